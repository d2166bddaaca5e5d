"use strict"
// Everything here is an extra: the page reads without it.
// What is packed in the page: gzip in base 64.
const unpacked = async element => {
  const text = element.textContent
  const bytes = Uint8Array.fromBase64?.(text) ?? (letters => {
    const found = new Uint8Array(letters.length)
    for (let i = 0; i < letters.length; i++) found[i] = letters.charCodeAt(i)
    return found
  })(atob(text))
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text()
}
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
})
system.addEventListener("change", label)

// --- Configurations: the choice of another trainer is open while one is chosen.
all("[name=cfg]").forEach(radio => radio.addEventListener("change", () => {
  const others = one(".bar details")
  if (others?.contains(one(`[for=${radio.id}]`))) others.open = true
}))

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

// --- Charts: what the nearest point says, under the pointer or the finger.
const tip = document.createElement("div")
tip.className = "tip"
tip.hidden = true
document.body.append(tip)
const ring = document.createElementNS("http://www.w3.org/2000/svg", "circle")
ring.setAttribute("class", "ring")
ring.setAttribute("r", 6)
all(".panels").forEach(chart => {
  let points
  all("svg.pic", chart).forEach((picture, i) => {
    const away = () => { tip.hidden = true; ring.remove() }
    const show = event => {
      points ??= json(one("script", chart))
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(picture.getScreenCTM().inverse())
      const far = ([x, y]) => (x - at.x) ** 2 + (y - at.y) ** 2
      const near = points[i].reduce((best, point) => far(point) < far(best) ? point : best, [1e4, 1e4])
      if (far(near) > 900) return away()
      ring.setAttribute("cx", near[0])
      ring.setAttribute("cy", near[1])
      picture.append(ring)
      tip.textContent = near[2]
      tip.hidden = false
      const there = new DOMPoint(near[0], near[1]).matrixTransform(picture.getScreenCTM())
      tip.style.left = `${Math.max(4, Math.min(there.x - tip.offsetWidth / 2, innerWidth - tip.offsetWidth - 4))}px`
      tip.style.top = `${there.y > tip.offsetHeight + 70 ? there.y - tip.offsetHeight - 10 : there.y + 12}px`
    }
    picture.addEventListener("pointermove", show)
    picture.addEventListener("pointerdown", show)
    picture.addEventListener("pointerleave", away)
  })
})
addEventListener("scroll", () => { tip.hidden = true; ring.remove() }, { passive: true })

// --- Print is light, with every fold of a table left as it is.
addEventListener("beforeprint", () => {
  root.dataset.print = root.dataset.theme ?? ""
  root.dataset.theme = "light"
})
addEventListener("afterprint", () => {
  if (root.dataset.print) root.dataset.theme = root.dataset.print
  else delete root.dataset.theme
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
    if (!head.textContent.trim()) return
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
  let details
  const fill = () => details ??= unpacked(one("script.cards")).then(text => {
    const cards = document.createElement("template")
    cards.innerHTML = text
    all("[data-p]", cards.content).forEach(card => one(".pc", document.getElementById(`p-${card.dataset.p}`)).prepend(...card.children))
  })
  search.addEventListener("input", () => fill().then(show))
  if (location.hash.startsWith("#p-")) fill()
  addEventListener("hashchange", fill)
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
      fill()
      link.setAttribute("aria-expanded", link.closest("tbody").classList.toggle("on"))
    })
  })
  const own = one("option[data-own]", trainer)
  if (own) trainer.value = own.value
  show()
}

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
