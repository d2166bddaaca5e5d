"use strict"
// Everything here is an extra: the page reads without it.
{
const root = document.documentElement
const all = (selector, within = document) => [...within.querySelectorAll(selector)]
const one = (selector, within = document) => within.querySelector(selector)
const json = element => JSON.parse(element.textContent)

// --- Theme: the system's, unless the reader chose one.
const toggle = one("button.theme")
const system = matchMedia("(prefers-color-scheme: dark)")
const dark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark"
const label = () => {
  toggle.textContent = dark() ? "Light" : "Dark"
  toggle.setAttribute("aria-label", `Switch to the ${toggle.textContent.toLowerCase()} theme`)
}
toggle.hidden = false
label()
toggle.addEventListener("click", () => {
  root.dataset.theme = dark() ? "light" : "dark"
  try { localStorage.setItem("offpol-theme", root.dataset.theme) } catch { /* no storage */ }
  label()
  redraw()
})
system.addEventListener("change", () => { label(); redraw() })

// --- Copy buttons.
all(".cp").forEach(button => {
  button.hidden = false
  button.addEventListener("click", async () => {
    const text = button.nextElementSibling.textContent
    try { await navigator.clipboard.writeText(text) } catch {
      getSelection().selectAllChildren(button.nextElementSibling)
      document.execCommand("copy")
    }
    button.textContent = "Copied"
    setTimeout(() => { button.textContent = "Copy" }, 1500)
  })
})

// --- Packed data: gzip in base 85 (RFC 1924), with a comma for "less than".
const digits = new Uint8Array(128)
;[..."0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;,=>?@^_`{|}~"].forEach((c, i) => { digits[c.charCodeAt(0)] = i })
const bytes = text => {
  const missing = (5 - text.length % 5) % 5
  const padded = text + "~".repeat(missing)
  const view = new DataView(new ArrayBuffer(padded.length / 5 * 4))
  for (let at = 0; at < padded.length; at += 5) {
    let word = 0
    for (let i = at; i < at + 5; i++) word = word * 85 + digits[padded.charCodeAt(i)]
    view.setUint32(at / 5 * 4, word)
  }
  return new Uint8Array(view.buffer, 0, view.byteLength - missing)
}
const unpacked = element => {
  const stream = new Blob([bytes(element.textContent)]).stream().pipeThrough(new DecompressionStream("gzip"))
  return new Response(stream).text()
}

// --- Charts: static until near the view, then drawn by plotly; all of them for print.
const shared = json(document.getElementById("plot-shared"))
const drawn = new Set()
const charts = all(".panels")
const coloured = (value, colours) => {
  if (typeof value === "string") return value.startsWith("--") ? colours.getPropertyValue(value).trim() : value
  if (Array.isArray(value)) return value.map(each => coloured(each, colours))
  if (value === null || typeof value !== "object") return value
  return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, coloured(each, colours)]))
}
const laid = (under, over) => {
  const both = { ...under }
  for (const [key, value] of Object.entries(over))
    both[key] = value && under[key] && value.constructor === Object ? laid(under[key], value) : value
  return both
}
const draw = chart => {
  const colours = getComputedStyle(root)
  const specs = json(one(".plot-data", chart))
  all(".panel", chart).forEach((panel, i) => {
    panel.classList.add("drawn")
    const plot = one(".plot", panel)
    if (specs[i].data.some(trace => trace.type === "heatmap")) plot.classList.add("tall")
    Plotly.react(plot, coloured(specs[i].data, colours), coloured(laid(shared.layout, specs[i].layout), colours), shared.config)
  })
  drawn.add(chart)
}
const redraw = () => drawn.forEach(draw)
let unpacking
const unpack = () => unpacking ??= (async () => {
  const script = document.createElement("script")
  script.textContent = await unpacked(document.getElementById("plotly-gz"))
  document.head.append(script)
})()
const watcher = new IntersectionObserver(entries => entries.filter(entry => entry.isIntersecting).forEach(({ target }) => {
  watcher.unobserve(target)
  unpack().then(() => draw(target))
}), { rootMargin: "300px" })
charts.forEach(chart => watcher.observe(chart))
const whenIdle = work => addEventListener("load", () => (window.requestIdleCallback ?? setTimeout)(work))
if (charts.length) whenIdle(unpack) // ready for print
addEventListener("beforeprint", () => {
  root.dataset.print = root.dataset.theme ?? ""
  root.dataset.theme = "light"
  if (window.Plotly) charts.filter(chart => !chart.closest("details:not([open])")).forEach(draw)
})
addEventListener("afterprint", () => {
  if (root.dataset.print) root.dataset.theme = root.dataset.print
  else delete root.dataset.theme
  redraw()
})

// --- Tables: a click on a column head sorts by it, a second click the other way round.
const order = cell => {
  const text = cell.firstChild?.textContent.trim().replaceAll(",", "") ?? ""
  const number = cell.className === "number" || (!cell.className && cell.closest(".dense"))
  return text.startsWith("10^") ? 10 ** text.slice(3) : number ? parseFloat(text.replace("−", "-")) : NaN
}
const compare = (a, b) => {
  const [x, y] = [order(a), order(b)]
  if (isNaN(x) || isNaN(y)) return isNaN(x) && isNaN(y) ? a.textContent.localeCompare(b.textContent, "en", { numeric: true }) : isNaN(x) - isNaN(y)
  return x - y
}
const turned = (head, heads, first) => {
  const down = head.ariaSort ? head.ariaSort === "ascending" : first
  heads.forEach(other => other.removeAttribute("aria-sort"))
  head.ariaSort = down ? "descending" : "ascending"
  return down ? -1 : 1
}
const sortable = table => {
  if (table.tBodies[0].rows.length < 3) return
  const heads = all("thead th", table)
  heads.forEach((head, column) => {
    const button = document.createElement("button")
    button.type = "button"
    button.append(...head.childNodes)
    button.addEventListener("click", () => {
      const way = turned(head, heads, false)
      table.tBodies[0].append(...all("tbody tr", table).sort((a, b) => compare(a.cells[column], b.cells[column]) * way))
    })
    head.append(button)
  })
}
all("table.t").forEach(sortable)

// --- Presets: search, trainer, kind, which of them, and sorting of whole rows with their cards.
const presets = one(".ps")
if (presets) {
  const ctl = one(".ctl")
  const bodies = all("tbody", presets)
  const [search, trainer, kind] = [one("input", ctl), one(".by-trainer", ctl), one(".by-kind", ctl)]
  const views = all(".seg button", ctl)
  ctl.hidden = false
  const pinned = body => "pin" in body.dataset
  const view = name => {
    presets.dataset.view = name
    views.forEach(button => button.setAttribute("aria-pressed", button.dataset.view === name))
  }
  const show = () => {
    const words = search.value.toLowerCase()
    if ((words || trainer.value || kind.value) && presets.dataset.view === "family") view("all")
    let shown = 0
    bodies.forEach(body => {
      const of = pinned(body) || ((!trainer.value || ` ${body.dataset.t} `.includes(` ${trainer.value} `)) && (!kind.value || body.dataset.k === kind.value))
      const ok = of && (!words || body.textContent.toLowerCase().includes(words))
      body.classList.toggle("hide", !ok)
      if (ok && !pinned(body) && ({ family: "f", distinct: "d" }[presets.dataset.view] ?? "v") in body.dataset) shown++
    })
    one("[role=status]", ctl).textContent = `${shown} shown`
  }
  views.forEach(button => button.addEventListener("click", () => { view(button.dataset.view); show() }))
  ;[[search, "input"], [trainer, "change"], [kind, "change"]].forEach(([field, event]) => field.addEventListener(event, show))
  const heads = all("thead th", presets)
  heads.filter(head => head.dataset.i).forEach(head => one("button", head).addEventListener("click", () => {
    const way = turned(head, heads, true)
    const value = body => { const text = body.dataset.v.split(",")[head.dataset.i]; return text === "" ? -Infinity * way : +text }
    presets.append(...bodies.sort((a, b) => pinned(b) - pinned(a) || (value(a) - value(b)) * way || 0))
  }))
  all("tbody th a", presets).forEach(link => {
    link.setAttribute("aria-expanded", "false")
    link.addEventListener("click", event => {
      event.preventDefault()
      link.setAttribute("aria-expanded", link.closest("tbody").classList.toggle("on"))
    })
  })
  const own = one("option[data-own]", trainer)
  if (own) trainer.value = own.value
  show()
}

// --- Large folded tables are packed: filled in when there is time, or when one is opened.
const filling = new WeakSet()
const fill = async script => {
  if (filling.has(script)) return
  filling.add(script)
  const body = document.createElement("div")
  body.innerHTML = await unpacked(script)
  script.replaceWith(body)
  all("table.t", body).forEach(sortable)
}
all("details.lookup").forEach(details => details.addEventListener("toggle", () => all("script.packed", details).forEach(fill)))
whenIdle(() => all("script.packed").forEach(fill))

// --- Contents: the section in view is marked.
const links = new Map(all(".top nav a").map(link => [link.hash.slice(1), link]))
const reading = new IntersectionObserver(entries => entries.forEach(({ target, isIntersecting }) => {
  if (!isIntersecting) return
  links.forEach(link => link.removeAttribute("aria-current"))
  links.get(target.id)?.setAttribute("aria-current", "true")
}), { rootMargin: "-20% 0px -70% 0px" })
all("main > section").forEach(section => reading.observe(section))
}
