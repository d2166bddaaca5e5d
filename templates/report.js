"use strict"
// Everything here is an extra: the page reads without it.
{
const all = (selector, within = document) => [...within.querySelectorAll(selector)]
const one = (selector, within = document) => within.querySelector(selector)
const json = element => JSON.parse(element.textContent)

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
