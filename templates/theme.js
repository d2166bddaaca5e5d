// Before the first paint: the theme the reader chose, if any.
try { const theme = localStorage.getItem("offpol-theme"); if (theme) document.documentElement.dataset.theme = theme } catch { /* no storage */ }
document.documentElement.classList.add("js")
