// Returns what a reader of this page cannot see or read, as sentences. `desk`: the screen is wide.
(desk) => {
  const LEAST_CONTRAST = 3, LONGEST_LINE = 80, SLACK = 2;
  const found = new Set(), screen = document.documentElement.clientWidth;
  const words = (text) => JSON.stringify(text.trim().slice(0, 50));

  const over = ([r, g, b, a], below) => [r, g, b].map((part, n) => part * a + below[n] * (1 - a));
  const kept = (compute) => {
    const known = new Map();
    return (part) => {
      if (!known.has(part)) known.set(part, compute(part));
      return known.get(part);
    };
  };
  const numbers = kept((color) => {
    const parts = color.match(/[\d.]+(e-?\d+)?/g).map(Number);
    const [r, g, b] = color.startsWith("color(") ? parts.map((part) => part * 255) : parts;
    return [r, g, b, parts[3] ?? 1];
  });
  const style = kept((part) => getComputedStyle(part));
  const paper = kept((part) => {
    if (!part) return [255, 255, 255];
    return over(numbers(style(part).backgroundColor), paper(part.parentElement));
  });
  const opacity = kept((part) => (part ? style(part).opacity * opacity(part.parentElement) : 1));
  const shapesBelow = (box) => {  // of a drawing: the fills under the middle of a text
    const below = document.elementsFromPoint((box.left + box.right) / 2, (box.top + box.bottom) / 2);
    let color = [255, 255, 255];
    for (const part of below.reverse()) {
      if (!["rect", "path", "circle"].includes(part.tagName) || style(part).fill === "none") continue;
      const [r, g, b, a] = numbers(style(part).fill);
      color = over([r, g, b, a * style(part).fillOpacity * opacity(part)], color);
    }
    return color;
  };
  const light = (color) => {
    const [r, g, b] = color.map((part) => (part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [darker, lighter] = [light(one), light(other)].sort((a, b) => a - b);
    return (lighter + 0.05) / (darker + 0.05);
  };

  const isDrawing = document.documentElement.tagName === "svg";
  const root = document.documentElement.getBoundingClientRect();
  const checked = new Set();
  const checkContrast = (part, text, box) => {
    if (checked.has(part)) return;
    checked.add(part);
    const below = isDrawing ? shapesBelow(box) : paper(part);
    const [r, g, b, a] = numbers(part instanceof SVGElement ? style(part).fill : style(part).color);
    const ratio = contrast(over([r, g, b, a * opacity(part)], below), below);
    if (ratio < LEAST_CONTRAST) found.add(`contrast ${ratio.toFixed(1)}: ${words(text)}`);
  };
  const scrolls = kept((part) => part.scrollWidth > part.clientWidth + SLACK);
  const longestLine = kept((part) => Math.max(...part.innerText.split("\n").map((line) => line.length)));
  const edgeOf = kept((part) => part.getBoundingClientRect());
  const clipperOf = kept((part) => {  // the element itself, or what is around it
    if (!part || part === document.body) return null;
    const { overflowX, overflowY, position } = style(part);
    return overflowX === "visible" && overflowY === "visible" && position !== "fixed" ? clipperOf(part.parentElement) : part;
  });
  const checkPlace = (part, text, box) => {
    for (let around = clipperOf(part); around; around = clipperOf(around.parentElement)) {
      const { overflowX, overflowY, position } = style(around), edge = edgeOf(around);
      if (["auto", "scroll"].includes(overflowX)) {
        const isLong = () => around.closest("pre") && longestLine(around) > LONGEST_LINE;
        if (desk && scrolls(around) && !isLong()) found.add(`sideways scrolling: ${words(around.innerText)}`);
        return;
      }
      if (overflowX !== "visible" && (box.right > edge.right + SLACK || box.left < edge.left - SLACK)) found.add(`cut off: ${words(text)}`);
      if (overflowY === "hidden" && (box.bottom > edge.bottom + SLACK || box.top < edge.top - SLACK)) found.add(`cut off below: ${words(text)}`);
      if (position === "fixed") return;
    }
    if (box.right > screen + SLACK || box.left < -SLACK) found.add(`beyond the screen: ${words(text)}`);
  };
  const checkInDrawing = (text, box) => {
    if (box.left < root.left || box.right > root.right || box.top < root.top || box.bottom > root.bottom) found.add(`beyond the drawing: ${words(text)}`);
    for (const [earlier, other] of boxes) {
      const wide = Math.min(box.right, other.right) - Math.max(box.left, other.left);
      const high = Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top);
      if (wide > 1 && high > box.height / 3) found.add(`${words(text)} covers ${words(earlier)}`);
    }
    boxes.push([text, box]);
  };

  const boxes = [], range = document.createRange();
  const walker = document.createTreeWalker(document.body ?? document.documentElement, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data, part = walker.currentNode.parentElement;
    if (!text.trim() || part.closest("script, style, noscript, title")) continue;
    if (!part.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    range.selectNodeContents(walker.currentNode);
    const box = range.getBoundingClientRect();
    if (!box.width || !box.height || box.right <= 0) continue;  // a drawer that is closed
    checkContrast(part, text, box);
    if (isDrawing) checkInDrawing(text, box);
    else checkPlace(part, text, box);
  }
  for (const picture of document.querySelectorAll("img, body svg")) {
    const box = picture.getBoundingClientRect(), isShown = picture.checkVisibility();
    if (picture.tagName === "IMG" && !picture.naturalWidth) found.add(`not loaded: ${picture.src.slice(-60)}`);
    else if (isShown && !(box.width > 0 && box.height > 0)) found.add(`a picture without a size: ${picture.outerHTML.slice(0, 60)}`);
  }
  if (!isDrawing && document.documentElement.scrollWidth > screen) found.add(`the page is ${document.documentElement.scrollWidth} px wide`);
  return [...found];
}
