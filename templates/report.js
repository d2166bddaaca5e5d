"use strict"
// Everything here is an extra: the page reads without it.
{
const all = selector => [...document.querySelectorAll(selector)]
const one = selector => document.querySelector(selector)

// --- Copy buttons.
all(".cp").forEach(button => {
  button.hidden = false
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(button.nextElementSibling)
    await navigator.clipboard?.writeText(button.nextElementSibling.textContent)
      .catch(() => document.execCommand("copy"))
    button.textContent = "Copied"
    setTimeout(() => { button.textContent = "Copy" }, 1500)
  })
})

// --- Charts: drawn by plotly when they come into view, as light or dark, wide or narrow as the page is.
const unpacked = async text => new Response(new Blob([Uint8Array.from(atob(text), c => c.charCodeAt(0))]).stream()
  .pipeThrough(new DecompressionStream("gzip"))).text()
const { nonce } = document.currentScript
let plotly
const loaded = () => plotly ??= unpacked(one("#plotly").textContent)
  .then(text => document.head.append(Object.assign(document.createElement("script"), { nonce, text })))
const dark = matchMedia("(prefers-color-scheme: dark)"), wide = matchMedia("(min-width: 1000px)")
const touch = matchMedia("(pointer: coarse)")
const draw = async place => {
  const { data, layout } = JSON.parse(await unpacked(place.dataset.chart))
  const panels = layout.grid.columns
  if (!wide.matches) Object.assign(layout, { height: layout.height * panels, grid: { ...layout.grid, rows: panels, columns: 1 } })
  const template = JSON.parse(one("#looks").textContent)[dark.matches ? "dark" : "light"]
  await loaded()
  Plotly.react(place, data, { ...layout, template, dragmode: touch.matches ? false : "zoom" }, { displaylogo: false, responsive: true })
}
const seen = new IntersectionObserver(entries => entries.filter(entry => entry.isIntersecting).forEach(({ target }) => {
  seen.unobserve(target)
  draw(target)
}), { rootMargin: "600px" })
all(".plot").forEach(place => seen.observe(place))
;[dark, wide].forEach(query => query.addEventListener("change", () => all(".plot.js-plotly-plot").forEach(draw)))
addEventListener("beforeprint", () => all(".plot").forEach(draw))
}
