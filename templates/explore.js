"use strict"
// Explore: a chart drawn large by plotly, which is unpacked and run at the first click and not before.
{
const root = document.documentElement
const make = (name, facts = {}, ...inside) => {
  const made = Object.assign(document.createElement(name), facts)
  made.append(...inside)
  return made
}
const frame = () => new Promise(requestAnimationFrame)
const whole = () => document.readyState === "loading" && new Promise(done => addEventListener("DOMContentLoaded", done))

// --- What stands in the page, packed. The hash of plotly's text is in the page's policy, so it may run.
let loading
const load = () => loading ??= (async () => {
  const [plotly, figures] = await Promise.all(["plotly", "figures"].map(id => unpacked(document.getElementById(id))))
  await frame()
  const script = make("script", { textContent: plotly })
  document.head.append(script)
  script.remove()
  if (!globalThis.Plotly) throw new Error("the script of plotly did not run")
  return JSON.parse(figures)
})().catch(error => { loading = undefined; throw error })

// --- Names in figures are escaped for plotly, and colours are variables of the style sheet.
const CODES = { "&lt;": "<", "&gt;": ">", "&#37;": "%", "&#36;": "$", "&#40;": "(", "&amp;": "&" }
const bare = text => text.replace(/&(?:lt|gt|amp|#3[67]|#40);/g, code => CODES[code])
const painted = (value, style) => {
  if (typeof value === "string") return /^var\(--\w+\)$/.test(value) ? style.getPropertyValue(value.slice(4, -1)).trim() : value
  if (!value || typeof value !== "object") return value
  if (Array.isArray(value)) return value.map(one => painted(one, style))
  return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, painted(one, style)]))
}

// --- The dialog.
const group = (label, more = {}) => {
  const made = make("div", { className: "seg", ...more })
  made.setAttribute("role", "group")
  made.setAttribute("aria-label", label)
  return made
}
const button = (text, click, facts = {}) => {
  const made = make("button", { type: "button", textContent: text, ...facts })
  made.addEventListener("click", click)
  return made
}
const title = make("h2", { id: "explored" })
const sub = make("p", { className: "sub" })
const shut = button("×", () => dialog.close(), { className: "btn shut", ariaLabel: "Close" })
const drifts = group("Pair of policies")
const rising = group("Vertical axis")
const across = group("Horizontal axis")
const drag = group("Dragging")
const reset = button("Reset zoom", () => { state.ranges = {}; draw() }, { className: "btn" })
const save = group("Download", { className: "seg save" })
const layers = make("div", { className: "layers" })
layers.setAttribute("role", "group")
layers.setAttribute("aria-label", "Layers")
const large = make("div", { className: "large off", tabIndex: 0 })
large.setAttribute("role", "group")
const said = make("p", { className: "said" })
said.setAttribute("role", "status")
const ways = make("div", { className: "ways" }, drifts, rising, across, drag, reset, save)
const dialog = make("dialog", { className: "xp" }, make("header", {}, make("div", {}, title, sub), shut), ways, layers, large, said)
dialog.setAttribute("aria-labelledby", "explored")
document.body.append(dialog)

const HINT = "Drag to zoom, double-click to reset; arrow keys go from point to point."
const COARSE = "Tap a point for its numbers; choose Zoom or Pan to move within the chart."
const coarse = matchMedia("(pointer: coarse)").matches
let state, look, from
const chosen = () => state.chart.find(one => one.drift === state.drift) ?? state.chart[0]
const say = (text, point = false) => { said.textContent = text; said.classList.toggle("point", point) }

const open = async opener => {
  from = opener
  const { chart, drift } = opener.dataset
  const words = opener.closest("figure")
  title.textContent = words.getAttribute("aria-label")
  sub.textContent = words.querySelector(".sub")?.textContent ?? ""
  large.setAttribute("aria-label", `${title.textContent}. Arrow keys go from point to point.`)
  ways.inert = layers.hidden = true
  ;[drifts, rising, across].forEach(one => { one.hidden = true })
  clear()
  state = undefined
  say(globalThis.Plotly ? "Drawing…" : "Loading plotly, which takes a second, once…")
  dialog.showModal()
  large.focus()
  const asked = opener
  try {
    await whole()
    await frame()
    await frame()  // until the dialog is seen
    const { look: shared, charts } = await load()
    if (!dialog.open || from !== asked) return
    look = shared
    state = { chart: charts[chart], drift, ranges: {}, rising: "", across: "", hidden: new Set(), drag: coarse ? false : "zoom", at: null }
    large.classList.remove("off")
    draw()
    ways.inert = false
    say(coarse ? COARSE : HINT)
    performance.mark("explored")
  } catch (error) {
    large.classList.remove("off")
    say(`The chart cannot be drawn here: ${error.message}`)
  }
}
const clear = () => {
  if (large.layout) Plotly.purge(large)
  large.replaceChildren()
  large.classList.add("off")
}
dialog.addEventListener("close", () => {
  clear()
  state = undefined
  from?.focus({ preventScroll: true })
})
dialog.addEventListener("click", event => { if (event.target === dialog) dialog.close() })
document.querySelectorAll(".ex").forEach(one => one.addEventListener("click", () => open(one)))

// --- Controls: what can be chosen for this chart.
const choices = (where, label, options, now, choose) => {
  where.hidden = options.length < 2
  const held = where.contains(document.activeElement) && document.activeElement.dataset.value
  where.replaceChildren(...options.map(([value, text]) => {
    const made = button(text, () => choose(value))
    made.dataset.value = value
    made.setAttribute("aria-pressed", value === now)
    return made
  }))
  if (held) where.querySelector(`[data-value="${held}"]`)?.focus()
}
const scales = (panels, axis) => panels.map(panel => Object.keys(panel[axis].scales)).filter(some => some.length)
const scaled = (panels, axis, now) => {  // the first panel of a log axis says what is shown, else the first of all
  const some = scales(panels, axis)
  return now || (some.find(([own]) => own === "log") ?? some[0])?.[0]
}
const AXES = [["log", "Log"], ["linear", "Linear"]]
const controls = figure => {
  const { panels } = figure.layout.meta
  const drawn = state.chart.filter(one => one.label)
  choices(drifts, "", drawn.map(one => [one.drift, one.label]), chosen().drift, value => {
    Object.assign(state, { drift: value, ranges: {}, at: null })
    draw()
    say(HINT)
  })
  for (const [where, axis, name, word] of [[rising, "y", "rising", "↑"], [across, "x", "across", "→"]]) {
    const now = scaled(panels, axis, state[name])
    choices(where, "", scales(panels, axis).length ? AXES.map(([value, text]) => [value, `${word} ${text}`]) : [], now, value => {
      Object.assign(state, { [name]: value, ranges: {} })
      draw()
    })
  }
  choices(drag, "", [["zoom", "Zoom"], ["pan", "Pan"]], state.drag, value => { state.drag = value; draw() })
}
const chips = figure => {
  const groups = figure.data.filter(trace => trace.showlegend)
  layers.hidden = groups.length < 2
  const held = layers.contains(document.activeElement) && document.activeElement.dataset.group
  layers.replaceChildren(...groups.map(trace => {
    const colour = [trace.line?.color ?? trace.marker.color].flat()[0]
    const swatch = make("i", { className: trace.type === "bar" ? "block" : trace.line?.dash || trace.mode === "markers" ? "dots" : "" })
    swatch.style.cssText = `background: ${colour}; --of: ${colour}`
    const made = button("", () => {
      const { hidden } = state
      hidden.delete(trace.legendgroup) || hidden.add(trace.legendgroup)
      draw()
    })
    made.dataset.group = trace.legendgroup
    made.append(swatch, bare(trace.name))
    made.setAttribute("aria-pressed", !state.hidden.has(trace.legendgroup))
    return made
  }))
  if (held) layers.querySelector(`[data-group="${held}"]`)?.focus()
}

// --- Axes: panels below each other, or side by side where there is room; scales; ticks that fit; tints within view.
const axis = (layout, letter, i) => layout[`${letter}axis${i ? i + 1 : ""}`]
const ROW = 140, GAP = 46, BESIDE = 820
const arranged = (figure, width, height) => {
  const { layout } = figure
  const { panels, shared } = layout.meta
  const { margin } = layout
  const columns = panels.length > 1 && !shared && width >= BESIDE
  const rows = columns ? 1 : panels.length
  const turned = !shared && panels.slice(0, -1).some(panel => panel.names && slanted(panel.x.ticks, (width - margin.l - margin.r) / panel.x.ticks.length))
  const between = GAP + (turned ? 52 : 0)
  Object.assign(layout, { width, height: Math.max(height, rows * ROW + (rows - 1) * between + margin.t + margin.b) })
  const inner = layout.height - margin.t - margin.b
  const gap = columns ? 84 / (width - margin.l - margin.r) : between / inner
  const each = (1 - gap * (panels.length - 1)) / panels.length
  const room = (columns ? each * (width - margin.l - margin.r) + 40 : width - 16) / 6.7
  panels.forEach((_, i) => {
    const low = i * (each + gap)
    const lead = layout.annotations[i]
    if (bare(lead.text).length > room) lead.text = lines(bare(lead.text), room).map(escaped).join("<br>")
    axis(layout, "x", i).domain = columns ? [low, Math.min(low + each, 1)] : [0, 1]
    axis(layout, "y", i).domain = columns ? [0, 1] : [Math.max(1 - low - each, 0), 1 - low]
  })
}
const rescaled = figure => {
  const { layout } = figure
  layout.meta.panels.forEach((panel, i) => {
    for (const [letter, name] of [["x", "across"], ["y", "rising"]]) {
      const own = Object.keys(panel[letter].scales)
      const now = state[name] && own.includes(state[name]) ? state[name] : own[0]
      const shown = axis(layout, letter, i)
      panel[letter].log = now === "log" || shown.type === "log"
      if (!now) continue
      const { axis: changed, ticks, title: words } = panel[letter].scales[now]
      panel[letter].log = now === "log"
      panel[letter].ticks = ticks
      delete shown.tickvals
      delete shown.ticktext
      Object.assign(shown, changed, { range: [...changed.range] })
      if (letter === "y") layout.annotations[i].text = words
      else if (shown.title.text) shown.title.text = words
    }
  })
}
const SPACE = { x: (a, b) => 3.6 * (a.length + b.length) + 14, y: () => 26 }
const fitted = (ticks, letter, [low, high], length) => {
  const kept = []
  for (const [at, text] of ticks) {
    const here = (at - low) / (high - low) * length
    if (here > -1 && here < length + 1 && kept.every(([other, name]) => Math.abs(other - here) > SPACE[letter](text, name))) kept.push([here, text, at])
  }
  return kept
}
const digital = ticks => ticks.every(([, text]) => /^\d+$/.test(text))
const slanted = (ticks, slot) => !digital(ticks) && 7 * Math.max(0, ...ticks.map(([, text]) => bare(text).length)) > slot
const named = (shown, ticks, [low, high], length) => {
  const slot = length / (high - low)
  const seen = ticks.filter(([at]) => at >= low && at <= high)
  const longest = Math.max(0, ...seen.map(([, text]) => bare(text).length))
  const digits = digital(seen)
  const turned = slanted(seen, slot)
  const every = Math.max(1, Math.ceil((turned ? 18 : digits ? 7.2 * longest + 10 : 1) / slot))
  const some = seen.filter((_, i) => i % every === 0)
  const short = text => turned && bare(text).length > 24 ? text.replace(/^((?:&[^;]+;|[^]){23})[^]*$/, "$1…") : text
  Object.assign(shown, { tickvals: some.map(([at]) => at), ticktext: some.map(([, text]) => short(text)), tickangle: turned ? -35 : 0 })
}
const fit = figure => {
  const { layout } = figure
  const inner = { x: layout.width - layout.margin.l - layout.margin.r, y: layout.height - layout.margin.t - layout.margin.b }
  layout.meta.panels.forEach((panel, i) => {
    for (const letter of ["x", "y"]) {
      const shown = axis(layout, letter, i)
      const length = inner[letter] * (shown.domain[1] - shown.domain[0])
      if (letter === "x" && panel.names) { named(shown, panel.x.ticks, shown.range, length); continue }
      shown.nticks = letter === "x" ? Math.max(3, Math.min(12, Math.floor(length / 70))) : Math.max(3, Math.min(9, Math.floor(length / 34)))
      const kept = fitted(panel[letter].ticks, letter, shown.range, length)
      delete shown.tickvals
      delete shown.ticktext
      if (kept.length > 1) Object.assign(shown, { tickvals: kept.map(([, , at]) => shown.type === "log" ? 10 ** at : at), ticktext: kept.map(([, text]) => text) })
    }
    const shown = axis(layout, "y", i)
    const place = value => shown.type === "log" ? Math.log10(value) : value
    const [low, high] = shown.range
    const height = inner.y * (shown.domain[1] - shown.domain[0])
    panel.tints.forEach(tint => {
      const shape = layout.shapes[tint.shape]
      const bottom = Math.max(tint.low === null ? low : place(tint.low), low)
      const top = Math.min(tint.high === null ? high : place(tint.high), high)
      shape.visible = top > bottom
      if (!shape.visible) return
      ;[shape.y0, shape.y1] = [bottom, top].map(at => shown.type === "log" ? 10 ** at : at)
      shape.label.text = (top - bottom) / (high - low) * height > 20 ? tint.name : ""
    })
  })
}

// --- Drawing: at first, after every choice, and at another size or in another theme.
const CONFIG = { displayModeBar: false, displaylogo: false, doubleClick: false, showTips: false, scrollZoom: !coarse, responsive: false }
const built = (width, height) => {
  const style = getComputedStyle(root)
  const { data, layout } = painted(chosen(), style)
  layout.template = { layout: painted(look, style) }
  const figure = { data, layout }
  rescaled(figure)
  arranged(figure, width, height)
  Object.entries(state.ranges).forEach(([name, range]) => { layout[name].range = [...range] })
  data.forEach(trace => { trace.visible = !state.hidden.has(trace.legendgroup) })
  Object.assign(layout, { showlegend: false, dragmode: state.drag })
  fit(figure)
  return figure
}
const draw = () => {
  const { title: words, sub: below } = chosen()
  title.textContent = bare(words)
  sub.textContent = bare(below)
  large.setAttribute("aria-label", `${title.textContent}. Arrow keys go from point to point.`)
  controls(chosen())
  chips(chosen())
  const first = !large.layout
  const width = large.clientWidth, height = large.clientHeight
  const figure = built(width, height)
  performance.mark("draw")
  Plotly.react(large, figure.data, figure.layout, CONFIG)
  performance.measure("drawn", "draw")
  Object.assign(state, { width, height })
  large.querySelectorAll("svg.main-svg").forEach(svg => svg.setAttribute("aria-hidden", "true"))
  if (!first) return
  large.on("plotly_relayout", changed => {
    const names = Object.keys(changed).filter(name => /^[xy]axis\d*\.(auto)?range/.test(name)).map(name => name.split(".")[0])
    if (!names.length || !state) return
    names.forEach(name => { state.ranges[name] = [...large.layout[name].range] })
    draw()
  })
  large.on("plotly_doubleclick", () => { state.ranges = {}; draw() })
}
new ResizeObserver(() => {
  if (state && large.layout && (Math.abs(large.clientWidth - state.width) > 1 || Math.abs(large.clientHeight - state.height) > 1)) draw()
}).observe(large)
const again = () => { if (state) draw() }
new MutationObserver(again).observe(root, { attributes: true, attributeFilter: ["data-theme"] })
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again)

// --- Arrow keys go from point to point and from layer to layer, and say each.
const walk = (over, along) => {
  const traces = large.data.map((trace, curve) => ({ trace, curve })).filter(({ trace }) =>
    trace.text && trace.visible !== false && trace.type !== "heatmap" && trace.y.some(y => y !== null))
  const heat = large.data.findIndex(trace => trace.type === "heatmap")
  if (!traces.length) return heat < 0 ? undefined : cell(heat, over, along)
  let place = traces.findIndex(({ curve }) => curve === state.at?.curve)
  const begins = place < 0
  place = begins ? 0 : (place + along + traces.length) % traces.length
  const { trace, curve } = traces[place]
  const known = trace.y.flatMap((y, i) => y === null || trace.x[i] === null ? [] : [i])
  let at = known.indexOf(state.at?.point)
  if (begins) at = over < 0 ? known.length - 1 : 0
  else if (along) at = known.reduce((best, i, j) => Math.abs(trace.x[i] - state.at.x) < Math.abs(trace.x[known[best]] - state.at.x) ? j : best, 0)
  else at = Math.abs(over) === Infinity ? (over > 0 ? known.length - 1 : 0) : Math.min(Math.max(at + over, 0), known.length - 1)
  const point = known[at]
  state.at = { curve, point, x: trace.x[point] }
  Plotly.Fx.hover(large, [{ curveNumber: curve, pointNumber: point }], `${trace.xaxis}${trace.yaxis}`)
  say(bare(trace.text[point]), true)
}
const cell = (curve, over, along) => {
  const { z, text, x, y, xaxis, yaxis } = large.data[curve]
  const known = z.flatMap((row, j) => row.flatMap((shade, i) => shade === null || x[i + 1] === x[i] || y[j + 1] === y[j] ? [] : [[i, j]]))  // seen ones
  if (!known.length) return
  const [i, j] = state.at?.cell ?? known[0]
  const far = ([a, b]) => over ? (Math.sign(a - i) === Math.sign(over) && b === j ? Math.abs(a - i) : Infinity) : (Math.sign(j - b) === Math.sign(along) && a === i ? Math.abs(b - j) : Infinity)
  const near = state.at?.cell ? known.reduce((best, one) => far(one) < far(best) ? one : best) : [i, j]
  if (state.at?.cell && far(near) === Infinity) return
  state.at = { cell: near }
  const middle = (edges, k) => (edges[k] + edges[k + 1]) / 2
  Plotly.Fx.hover(large, { xval: middle(x, near[0]), yval: middle(y, near[1]) }, `${xaxis}${yaxis}`)
  say(bare(text[near[1]][near[0]]), true)
}
const KEYS = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1], Home: [-Infinity, 0], End: [Infinity, 0] }
large.addEventListener("keydown", event => {
  const way = KEYS[event.key]
  if (!way || !state || !large.layout || event.altKey || event.ctrlKey || event.metaKey) return
  event.preventDefault()
  walk(...way)
})
large.addEventListener("blur", () => { if (large.layout) Plotly.Fx.unhover(large) })

// --- Downloads.
const download = (address, form) => {
  make("a", { href: address, download: `${bare(chosen().file)}.${form}` }).click()
}
const lines = (text, most) => text.match(new RegExp(`[^]{1,${Math.floor(most)}}(?=\\s|$)|\\S+`, "g"))?.map(line => line.trim()) ?? []
const escaped = text => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll("%{", "&#37;{").replaceAll("$", "&#36;")
const picture = async format => {
  const style = getComputedStyle(root)
  const width = Math.max(state.width, 900)
  const heads = [...lines(title.textContent, width / 8.4).map(line => `<b>${escaped(line)}</b>`),
    ...lines(sub.textContent, width / 6.4).map(line => `<span style="font-size:12px">${escaped(line)}</span>`)]
  const above = 22 * heads.length + 20
  const figure = built(width, Math.max(state.height, 420))
  const { layout, data } = figure
  const legend = data.filter(trace => trace.showlegend).length > 1
  const card = style.getPropertyValue("--card").trim()
  const top = above + (legend ? 30 : 0)
  layout.height += top
  layout.margin = { ...layout.margin, t: layout.margin.t + top }
  Object.assign(layout, {
    paper_bgcolor: card, plot_bgcolor: card, showlegend: legend,
    legend: { y: 1 + 26 / (layout.height - layout.margin.t - layout.margin.b) },
    title: { text: heads.join("<br>"), font: { size: 15 }, x: 0, xref: "container", xanchor: "left", y: 1, yref: "container", yanchor: "top", pad: { l: 16, t: 16 } },
  })
  download(await Plotly.toImage({ data, layout, config: CONFIG }, { format, width, height: layout.height, scale: format === "png" ? 2 : 1 }), format)
}
const field = value => {
  const text = value === null || value === undefined ? "" : typeof value === "string" ? bare(value) : String(value)
  const safe = /^[=+@\t\r-]/.test(text) && !Number.isFinite(+text) ? `'${text}` : text  // no formula of a spreadsheet
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe
}
const table = () => {
  const { data, layout } = chosen()
  const rows = [["panel", "series", "x", "y", "low", "high"]]
  for (const { type, name, x, y, meta } of data) {
    if (!meta) continue
    const up = layout.meta.panels[meta.panel].name
    if (type === "heatmap") {
      const { edges, counts } = meta
      rows[0] = ["x_low", "x_high", "y_low", "y_high", "tokens"]
      counts.forEach((row, i) => row.forEach((count, j) => count && rows.push([edges[i], edges[i + 1], edges[j], edges[j + 1], count])))
    } else {
      y.forEach((value, i) => value !== null && rows.push([up, name, meta.x?.[i] ?? x[i], value, meta.low?.[i], meta.high?.[i]]))
    }
  }
  return rows.map(row => row.map(field).join(",")).join("\r\n") + "\r\n"
}
const sheet = () => {
  const address = URL.createObjectURL(new Blob([table()], { type: "text/csv" }))
  download(address, "csv")
  setTimeout(() => URL.revokeObjectURL(address), 10000)
}
save.append(button("SVG", () => picture("svg")), button("PNG", () => picture("png")), button("CSV", sheet))
}
