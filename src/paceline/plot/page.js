"use strict";
// Adds what a page can do without: values under the pointer, and a choice of colors that is remembered.
(() => {
  const charts = JSON.parse(document.getElementById("data").textContent);

  const shown = (value) => {
    if (value === null || value === undefined) return "none";
    const size = Math.abs(value);
    if (size >= 1e6 || (size < 1e-3 && size > 0)) return value.toExponential(3);
    return value.toLocaleString("en", { maximumSignificantDigits: 6 });
  };

  const nearest = (steps, wanted) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] < wanted) low = middle; else high = middle;
    }
    return wanted - steps[low] <= steps[high] - wanted ? low : high;
  };

  const made = (kind, parent) => {
    const element = document.createElement("div");
    element.className = kind;
    parent.append(element);
    return element;
  };

  const height = (value, [low, high], scale) => scale === "log"
    ? 1 - (Math.log10(value) - Math.log10(low)) / (Math.log10(high) - Math.log10(low))
    : 1 - (value - low) / (high - low);

  const row = (line, place) => {
    const text = document.createElement("div");
    const key = document.createElement("i");
    key.className = `key c${line.color}`;
    let label = `${line.name} ${shown(line.y[place])}`;
    if (line.low && line.low[place] !== line.high[place]) label += ` (${shown(line.low[place])} to ${shown(line.high[place])})`;
    text.append(key, label);
    return text;
  };

  const show = (area, chart, event) => {
    hide(area);
    const box = area.getBoundingClientRect();
    const [left, right] = chart.x;
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const wanted = left + share * (right - left);
    const places = chart.lines.map((line) => nearest(line.x, wanted));
    const steps = chart.lines.map((line, number) => line.x[places[number]]);
    const step = steps.reduce((best, each) => Math.abs(each - wanted) < Math.abs(best - wanted) ? each : best);
    made("cross", area).style.left = `${(step - left) / (right - left) * 100}%`;
    const tip = made("tip", area);
    const head = document.createElement("b");
    head.textContent = `${chart.axis} ${shown(step)}`;
    tip.append(head);
    chart.lines.forEach((line, number) => {
      const value = line.y[places[number]];
      tip.append(row(line, places[number]));
      if (value === null) return;
      const point = made(`point c${line.color}`, area);
      point.style.left = `${(steps[number] - left) / (right - left) * 100}%`;
      point.style.top = `${height(value, chart.scales[area.dataset.scale], area.dataset.scale) * 100}%`;
    });
    if (share > 0.5) tip.style.right = `calc(${(1 - share) * 100}% + 12px)`;
    else tip.style.left = `calc(${share * 100}% + 12px)`;
  };

  const hide = (area) => area.querySelectorAll(".cross, .tip, .point").forEach((part) => part.remove());

  document.querySelectorAll("[data-chart]").forEach((area) => {
    const chart = charts[Number(area.dataset.chart)];
    area.addEventListener("pointermove", (event) => show(area, chart, event));
    area.addEventListener("pointerleave", () => hide(area));
  });

  // Ranks over steps: which cell is under the pointer, and what it says.
  const showCell = (area, map, event) => {
    hide(area);
    const box = area.getBoundingClientRect();
    const place = (share, count) => Math.min(count - 1, Math.max(0, Math.floor(share * count)));
    const share = (event.clientX - box.left) / box.width;
    const column = place(share, map.steps.length);
    const row = place((event.clientY - box.top) / box.height, map.ranks.length);
    const seconds = map.own_s[row][column];
    const tip = made("tip", area);
    const time = seconds === null ? "no measurement" : `${shown(seconds * 1000)} ms per step`;
    tip.textContent = `rank ${map.ranks[row]}, step ${shown(map.steps[column])}: ${time}`;
    if (share > 0.5) tip.style.right = `calc(${(1 - share) * 100}% + 12px)`;
    else tip.style.left = `calc(${share * 100}% + 12px)`;
  };

  document.querySelectorAll("[data-map]").forEach((area) => {
    const map = charts[Number(area.dataset.map)];
    area.addEventListener("pointermove", (event) => showCell(area, map, event));
    area.addEventListener("pointerleave", () => hide(area));
  });

  const kept = "paceline-theme";
  try {
    const last = document.getElementById(`theme-${localStorage.getItem(kept)}`);
    if (last) last.checked = true;
    document.querySelectorAll("[name=theme]").forEach((choice) =>
      choice.addEventListener("change", () => localStorage.setItem(kept, choice.value)));
  } catch (refused) {
    // A file without storage: the choice holds until the page is closed.
  }
})();
