"use strict"
// Everything here is an extra: the page reads without it.
{
const root = document.documentElement
const all = (selector, within = document) => [...within.querySelectorAll(selector)]
const json = element => JSON.parse(element.textContent)

// --- Theme: the system's, unless the reader chose one for this page.
const toggle = document.querySelector("button.theme")
const system = matchMedia("(prefers-color-scheme: dark)")
const dark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark"
const label = () => { toggle.textContent = dark() ? "Light" : "Dark" }
toggle.hidden = false
label()
toggle.addEventListener("click", () => {
  root.dataset.theme = dark() ? "light" : "dark"
  try { localStorage.setItem("offpol-diag:" + location.pathname, root.dataset.theme) } catch { /* no storage */ }
  label()
  redraw()
})
system.addEventListener("change", () => { label(); redraw() })

// --- What travels packed: gzip in base 85 (RFC 1924), with a comma for "less than".
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

// --- Charts: unpacked once, drawn when they come into view, and all of them for print.
const shared = json(document.getElementById("plot-shared"))
const drawn = new Set()
const plots = all(".plot")

const coloured = (value, colours) => {
  if (typeof value === "string") return value.startsWith("--") ? colours.getPropertyValue(value).trim() : value
  if (Array.isArray(value)) return value.map(one => coloured(one, colours))
  if (value === null || typeof value !== "object") return value
  return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, coloured(one, colours)]))
}
const laid = (under, over) => {
  const both = { ...under }
  for (const [key, value] of Object.entries(over))
    both[key] = value && under[key] && value.constructor === Object ? laid(under[key], value) : value
  return both
}
const draw = plot => {
  const { data, layout } = json(plot.parentElement.querySelector(".plot-data"))
  const colours = getComputedStyle(root)
  Plotly.react(plot, coloured(data, colours), coloured(laid(shared.layout, layout), colours), shared.config)
  drawn.add(plot)
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
plots.forEach(plot => watcher.observe(plot))
const whenIdle = work => addEventListener("load", () => (window.requestIdleCallback ?? setTimeout)(work))
if (plots.length) whenIdle(unpack)  // ready for print

const fitsPaper = details => !details.matches(".lookup") && all("thead th", details).length <= 14
addEventListener("beforeprint", () => {
  root.dataset.print = root.dataset.theme ?? ""
  root.dataset.theme = "light"
  if (window.Plotly) plots.forEach(draw)
  all("details.table:not([open])").filter(fitsPaper).forEach(details => { details.open = details.dataset.opened = true })
})
addEventListener("afterprint", () => {
  if (root.dataset.print) root.dataset.theme = root.dataset.print
  else delete root.dataset.theme
  all("details[data-opened]").forEach(details => { details.open = false; delete details.dataset.opened })
  redraw()
})

// --- Tables: a click on a column head sorts by it, a second click the other way round.
const order = cell => {
  const text = cell.firstChild?.textContent.trim().replace("unreliable: ", "").replaceAll(",", "") ?? ""
  const number = cell.className === "number" || (!cell.className && cell.closest(".dense"))
  return text.startsWith("10^") ? 10 ** text.slice(3) : number ? parseFloat(text) : NaN
}
const compare = (a, b) => {
  const [x, y] = [order(a), order(b)]
  if (isNaN(x) || isNaN(y)) return isNaN(x) && isNaN(y) ? a.textContent.localeCompare(b.textContent, "en", { numeric: true }) : isNaN(x) - isNaN(y)
  return x - y
}
const sort = (table, column, head) => {
  const down = head.ariaSort === "ascending"
  all("th[aria-sort]", table).forEach(other => other.removeAttribute("aria-sort"))
  head.ariaSort = down ? "descending" : "ascending"
  const rows = all("tbody tr", table).sort((a, b) => compare(a.cells[column], b.cells[column]) * (down ? -1 : 1))
  table.tBodies[0].append(...rows)
}
const sortable = table => {
  if (table.tBodies[0].rows.length < 3) return
  all("thead th", table).forEach((head, column) => {
    const button = document.createElement("button")
    button.type = "button"
    button.append(...head.childNodes)
    button.addEventListener("click", () => sort(table, column, head))
    head.append(button)
  })
}
all("table").forEach(sortable)

// --- Large folded tables travel packed: filled in when there is time, or when one is opened.
const filling = new WeakSet()
const fill = async script => {
  if (filling.has(script)) return
  filling.add(script)
  const body = document.createElement("div")
  body.innerHTML = await unpacked(script)
  script.replaceWith(body)
  all("table", body).forEach(sortable)
}
const filled = (within = document) => all("script.packed", within).forEach(fill)
all("details.lookup").forEach(details => details.addEventListener("toggle", () => filled(details)))
whenIdle(() => filled())

// --- Contents: the section in view is marked.
const links = new Map(all("nav a").map(link => [link.hash.slice(1), link]))
const reading = new IntersectionObserver(entries => entries.forEach(({ target, isIntersecting }) => {
  if (!isIntersecting) return
  links.forEach(link => link.removeAttribute("aria-current"))
  links.get(target.id)?.setAttribute("aria-current", "true")
}), { rootMargin: "-10% 0px -80% 0px" })
all("main > section").forEach(section => reading.observe(section))
}
