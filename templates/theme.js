// Before the first paint: the theme the reader chose for this page, if any.
try { const theme = localStorage.getItem("offpol-diag:" + location.pathname); if (theme) document.documentElement.dataset.theme = theme } catch { /* no storage */ }
document.documentElement.classList.add("js")
