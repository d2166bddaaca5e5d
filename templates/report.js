"use strict"
// Everything here is an extra: the page reads without it.
{
const all = (selector, within = document) => [...within.querySelectorAll(selector)]
const one = (selector, within = document) => within.querySelector(selector)
const json = element => JSON.parse(element.textContent)

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

// --- Charts: drawn by plotly when they come into view, as light or dark, wide or narrow as the page is.
const unpacked = async text => new Response(new Blob([Uint8Array.from(atob(text), c => c.charCodeAt(0))]).stream().pipeThrough(new DecompressionStream("gzip"))).text()
let plotly
const loaded = () => plotly ??= unpacked(one("#plotly").textContent).then(text => document.head.append(Object.assign(document.createElement("script"), { text })))
const dark = matchMedia("(prefers-color-scheme: dark)"), wide = matchMedia("(min-width: 1000px)"), touch = matchMedia("(pointer: coarse)")
const draw = async place => {
  const { data, layout } = JSON.parse(await unpacked(place.dataset.chart))
  if (layout.grid && !wide.matches) Object.assign(layout, { height: layout.height * layout.grid.columns, grid: { ...layout.grid, rows: layout.grid.columns, columns: 1 } })
  await loaded()
  Plotly.react(place, data, { ...layout, template: json(one("#looks"))[dark.matches ? "dark" : "light"], dragmode: touch.matches ? false : "zoom" }, { displaylogo: false, responsive: true })
}
const seen = new IntersectionObserver(entries => entries.filter(entry => entry.isIntersecting).forEach(({ target }) => { seen.unobserve(target); draw(target) }), { rootMargin: "600px" })
all(".plot").forEach(place => seen.observe(place))
;[dark, wide].forEach(query => query.addEventListener("change", () => all(".plot.js-plotly-plot").forEach(draw)))
addEventListener("beforeprint", () => all(".plot").forEach(draw))

// --- Tables: a click on a column head sorts by it, a second click the other way round.
const order = cell => {
  const text = cell.firstChild?.textContent.trim().replaceAll(",", "") ?? ""
  const number = cell.classList.contains("number")
  return text.startsWith("10^") ? 10 ** text.slice(3) : number ? parseFloat(text.replace("−", "-")) : NaN
}
const compare = (a, b) => {
  const [x, y] = [order(a), order(b)]
  if (isNaN(x) || isNaN(y)) return isNaN(x) && isNaN(y) ? a.textContent.localeCompare(b.textContent, "en", { numeric: true }) : isNaN(x) - isNaN(y)
  return x - y
}
const sortable = table => {
  if (table.tBodies[0].rows.length < 3) return
  const heads = all("thead th", table)
  heads.forEach((head, column) => {
    if (!head.textContent.trim()) return
    const button = document.createElement("button")
    button.type = "button"
    button.append(...head.childNodes)
    button.addEventListener("click", () => {
      const way = head.ariaSort === "ascending" ? -1 : 1
      heads.forEach(other => other.removeAttribute("aria-sort"))
      head.ariaSort = way > 0 ? "ascending" : "descending"
      table.tBodies[0].append(...all("tbody tr", table).sort((a, b) => compare(a.cells[column], b.cells[column]) * way))
    })
    head.append(button)
  })
}
all("table.t").forEach(sortable)

// --- Contents: a fade where it scrolls on, and the section in view is marked.
const contents = one(".top nav")
const fade = () => {
  contents.classList.toggle("less", contents.scrollLeft > 1)
  contents.classList.toggle("more", contents.scrollLeft + contents.clientWidth < contents.scrollWidth - 1)
}
contents.addEventListener("scroll", fade, { passive: true })
new ResizeObserver(fade).observe(contents)
const links = new Map(all(".top nav a").map(link => [link.hash.slice(1), link]))
const reading = new IntersectionObserver(entries => entries.forEach(({ target, isIntersecting }) => {
  if (!isIntersecting) return
  links.forEach(link => link.removeAttribute("aria-current"))
  links.get(target.id)?.setAttribute("aria-current", "true")
}), { rootMargin: "-20% 0px -70% 0px" })
all("main > section").forEach(section => reading.observe(section))
}
