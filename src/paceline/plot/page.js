"use strict";
// Adds what a page can do without: values under the pointer, another x axis, smoothing, files to keep, and remembered colors.
(() => {
  const { charts, clocks, marks } = JSON.parse(document.getElementById("data").textContent);
  const SIZE = 1000, DOTS = 60;
  const view = { axis: "step", smooth: 0 };

  // ---- numbers

  const shown = (value) => {
    if (value === null || value === undefined) return "none";
    const size = Math.abs(value);
    if (size >= 1e6 || (size < 1e-3 && size > 0)) return value.toExponential(3);
    return value.toLocaleString("en", { maximumSignificantDigits: 6 });
  };

  const duration = (seconds) => {
    if (seconds < 60) return `${Math.round(seconds * 10) / 10} s`;
    if (seconds < 3600) return `${Math.floor(seconds / 60)} min${Math.round(seconds % 60) ? ` ${Math.round(seconds % 60)} s` : ""}`;
    const hours = Math.floor(seconds / 3600), minutes = Math.round(seconds % 3600 / 60);
    return `${hours} h${minutes ? ` ${minutes} min` : ""}`;
  };

  const short = (value) => {
    const size = Math.abs(value);
    for (const [amount, suffix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
      if (size >= amount) return `${Number((value / (amount > 1e4 ? amount : 1e3)).toPrecision(4))}${suffix}`;
    return shown(Number(value.toPrecision(4)));
  };

  const ticks = (low, high, about = 5) => {
    const rough = (high - low) / about, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((nice) => nice * power >= rough * 0.999);
    const found = [];
    for (let place = Math.ceil(low / step - 1e-9); place <= Math.floor(high / step + 1e-9); place++) found.push(place * step);
    return found;
  };

  const timeTicks = (low, high) => {
    const steps = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400];
    const step = steps.find((each) => each * 6 >= high - low) || 86400 * Math.ceil((high - low) / 6 / 86400);
    const found = [];
    for (let time = Math.ceil(low / step) * step; time <= high; time += step) found.push(time);
    return found;
  };

  // ---- what is drawn now: the same lines over another axis, smoothed

  const nearest = (steps, wanted) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] < wanted) low = middle; else high = middle;
    }
    return wanted - steps[low] <= steps[high] - wanted ? low : high;
  };

  const AXES = { time: "time_s", samples: "samples" };

  const moved = (step, clock, axis) => {
    if (axis === "step" || !clock || clock.steps.length < 2) return step;
    const { steps } = clock, values = clock[AXES[axis]];
    let high = Math.min(Math.max(1, steps.findIndex((each) => each >= step)), steps.length - 1);
    if (step > steps[steps.length - 1]) high = steps.length - 1;
    const share = (step - steps[high - 1]) / (steps[high] - steps[high - 1]);
    return values[high - 1] + share * (values[high] - values[high - 1]);
  };

  // The moving average of TensorBoard: exponential, without the bias of its start.
  const smoothed = (values, weight) => {
    let last = 0, count = 0;
    return values.map((value) => {
      if (value === null || !weight) return value;
      last = last * weight + (1 - weight) * value;
      count += 1;
      return last / (1 - weight ** count);
    });
  };

  const current = (chart) => {
    if (chart.axis !== "step") return { axis: chart.axis, x: chart.x, lines: chart.lines.map((line) => ({ ...line, now: line.y })), smooth: 0 };
    const { axis } = view, smooth = chart.lines.some((line) => line.noisy) ? view.smooth : 0;
    const lines = chart.lines.map((line) => ({
      ...line, x: line.x.map((step) => moved(step, clocks[line.clock], axis)), now: smoothed(line.y, line.noisy ? smooth : 0),
    }));
    const ends = lines.flatMap((line) => [line.x[0], line.x[line.x.length - 1]]);
    const left = Math.min(...ends), right = Math.max(...ends);
    const x = axis === "step" ? chart.x : right > left ? [left, right] : [left - 1, right + 1];
    return { axis, x, lines, smooth };
  };

  const across = (value, [left, right], log) => log
    ? (Math.log(value) - Math.log(left)) / (Math.log(right) - Math.log(left))
    : (value - left) / (right - left);

  const height = (value, [low, high], scale) => scale === "log"
    ? 1 - (Math.log10(value) - Math.log10(low)) / (Math.log10(high) - Math.log10(low))
    : 1 - (value - low) / (high - low);

  const titles = { step: "step", time: "time since the first start", samples: "samples" };

  const xTicks = (now, chart) => {
    if (chart.log_x) return [...new Set(now.lines.flatMap((line) => line.x))].sort((a, b) => a - b).map((value) => [value, short(value)]);
    if (now.axis === "time") return timeTicks(...now.x).map((value) => [value, value ? duration(value) : "0"]);
    return ticks(...now.x).filter(Number.isInteger).map((value) => [value, short(value)]);
  };

  const placesOf = (now) => marks.map((mark) => {
    const clock = clocks.length === 1 ? 0 : now.lines.find((line) => line.color === mark.color)?.clock;
    const value = now.axis === "time" ? mark.time_s : moved(mark.step, clocks[clock], now.axis);
    return { ...mark, share: across(value, now.x) };
  }).filter((mark) => mark.share >= 0 && mark.share <= 1);

  // ---- shapes, in units of a width and a height

  const line = (xs, ys, x, y) => {
    let d = "", pen = "M";
    ys.forEach((value, place) => {
      if (value === null) { pen = "M"; return; }
      d += `${pen}${x(xs[place]).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = "L";
    });
    return d;
  };

  const ends = (each, x, y, form) => each.x.map((value, place) =>
    each.low[place] === null ? "" : form(x(value).toFixed(1), y(each.low[place]).toFixed(1), y(each.high[place]).toFixed(1))).join("");

  const shapes = (now, chart, scale, [width, tall]) => {
    const x = (value) => width * across(value, now.x, chart.log_x);
    const y = (value) => tall * height(value, chart.scales[scale], scale);
    const found = (chart.axis === "step" ? placesOf(now) : []).map((mark) => {
      const place = (mark.share * width).toFixed(1);
      return [`${mark.kind} c${mark.color}`, mark.kind === "restart" ? `M${place} 0V${tall}` : `M${place} ${tall}v${-0.045 * tall}`];
    });
    now.lines.forEach((each) => {
      const color = `c${each.color}`;
      if (each.low && each.bars) found.push([`error ${color}`, ends(each, x, y, (at, low, high) => `M${at} ${low}V${high}`)]);
      if (each.low && !each.bars && !(now.smooth && each.noisy)) found.push([`bounds ${color}`, ends(each, x, y, (at, low, high) => `M${at} ${low}V${high}`)]);
      if (now.smooth && each.noisy) found.push([`line raw ${color}`, line(each.x, each.y, x, y)]);
      found.push([`line ${color}${each.dashed ? " dashed" : ""}`, line(each.x, each.now, x, y)]);
      if (each.x.length <= DOTS && !(now.smooth && each.noisy))
        found.push([`dots ${color}`, each.now.map((value, place) => value === null ? "" : `M${x(each.x[place]).toFixed(1)} ${y(value).toFixed(1)}h0`).join("")]);
    });
    return found;
  };

  const svgElement = (name, attributes, text) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
    if (text !== undefined) element.textContent = text;
    return element;
  };

  const redraw = (area) => {
    const chart = charts[Number(area.dataset.chart)];
    if (chart.axis !== "step") return;
    const now = current(chart), svg = area.querySelector("svg");
    svg.querySelectorAll("path:not(.grid)").forEach((path) => path.remove());
    shapes(now, chart, area.dataset.scale, [SIZE, SIZE]).forEach(([kind, d]) => svg.append(svgElement("path", { class: kind, d })));
    area.querySelectorAll(".x").forEach((label) => label.remove());
    xTicks(now, chart).forEach(([value, text]) => {
      const label = document.createElement("span");
      label.className = "x";
      label.style.left = `${across(value, now.x) * 100}%`;
      label.textContent = text;
      area.append(label);
    });
    area.querySelector(".x-title").textContent = titles[now.axis];
  };

  // ---- values under the pointer

  const made = (kind, parent) => {
    const element = document.createElement("div");
    element.className = kind;
    parent.append(element);
    return element;
  };

  const row = (each, place) => {
    const text = document.createElement("div");
    const key = document.createElement("i");
    key.className = `key c${each.color}`;
    let label = `${each.name} ${shown(each.now[place])}`;
    if (each.now[place] !== each.y[place]) label += ` (not smoothed: ${shown(each.y[place])})`;
    else if (each.low && each.low[place] !== each.high[place]) label += ` (${shown(each.low[place])} to ${shown(each.high[place])})`;
    text.append(key, label);
    return text;
  };

  const hide = (area) => area.querySelectorAll(".cross, .tip, .point").forEach((part) => part.remove());

  const beside = (tip, share) => {
    if (share > 0.5) tip.style.right = `calc(${(1 - share) * 100}% + 12px)`;
    else tip.style.left = `calc(${share * 100}% + 12px)`;
  };

  const show = (area, chart, event) => {
    hide(area);
    const box = area.getBoundingClientRect(), now = current(chart);
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const [left, right] = now.x;
    const wanted = chart.log_x ? left * (right / left) ** share : left + share * (right - left);
    const places = now.lines.map((each) => nearest(each.x, wanted));
    const steps = now.lines.map((each, number) => each.x[places[number]]);
    const step = steps.reduce((best, each) => Math.abs(each - wanted) < Math.abs(best - wanted) ? each : best);
    made("cross", area).style.left = `${across(step, now.x, chart.log_x) * 100}%`;
    const tip = made("tip", area);
    const head = document.createElement("b");
    head.textContent = now.axis === "time" ? duration(step) : `${now.axis} ${shown(step)}`;
    tip.append(head);
    now.lines.forEach((each, number) => {
      const value = each.now[places[number]];
      tip.append(row(each, places[number]));
      if (value === null) return;
      const point = made(`point c${each.color}`, area);
      point.style.left = `${across(steps[number], now.x, chart.log_x) * 100}%`;
      point.style.top = `${height(value, chart.scales[area.dataset.scale], area.dataset.scale) * 100}%`;
    });
    beside(tip, share);
  };

  // Ranks over steps: which cell is under the pointer, and what it says.
  const showCell = (area, map, event) => {
    hide(area);
    const box = area.getBoundingClientRect();
    const place = (share, count) => Math.min(count - 1, Math.max(0, Math.floor(share * count)));
    const share = (event.clientX - box.left) / box.width;
    const column = place(share, map.steps.length);
    const rank = place((event.clientY - box.top) / box.height, map.ranks.length);
    const seconds = map.own_s[rank][column];
    const tip = made("tip", area);
    const time = seconds === null ? "no measurement" : `${shown(seconds * 1000)} ms per step`;
    tip.textContent = `rank ${map.ranks[rank]}, step ${shown(map.steps[column])}: ${time}`;
    beside(tip, share);
  };

  // ---- files to keep

  const keep = (name, kind, text) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: kind }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };

  // Quoted, and never a formula of a spreadsheet.
  const cell = (text) => `"${(/^[=+\-@\t]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;

  const csv = (chart) => {
    const timed = chart.axis === "step";
    const rows = [["line", chart.axis, ...(timed ? ["time_s", "samples"] : []), "value", "lowest", "highest"].map(cell).join(",")];
    chart.lines.forEach((each) => each.x.forEach((step, place) => {
      const clock = clocks[each.clock], more = timed ? [moved(step, clock, "time"), moved(step, clock, "samples")] : [];
      const bounds = each.low ? [each.low[place], each.high[place]] : [each.y[place], each.y[place]];
      rows.push([cell(each.name), step, ...(clock || !timed ? more : ["", ""]), each.y[place], ...bounds].map((value) => value ?? "").join(","));
    }));
    return `${rows.join("\n")}\n`;
  };

  const svgText = (area, chart) => {
    const width = 640, tall = 320, left = 80, top = 40, scale = area.dataset.scale;
    const styles = getComputedStyle(document.documentElement);
    const color = (name) => styles.getPropertyValue(name).trim();
    const root = svgElement("svg", { xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${width + left + 30} ${tall + top + 60 + 18 * chart.lines.length}`, "font-family": "system-ui, sans-serif", "font-size": 12 });
    root.append(svgElement("rect", { width: "100%", height: "100%", fill: color("--panel") }));
    const write = (x, y, text, more = {}) => root.append(svgElement("text", { x, y, fill: color("--ink"), ...more }, text));
    write(left, 22, chart.title, { "font-size": 15, "font-weight": 600 });
    const plot = svgElement("g", { transform: `translate(${left} ${top})`, fill: "none", "stroke-width": 1.6 });
    area.querySelectorAll(".y").forEach((label) => {
      const y = parseFloat(label.style.top) / 100 * tall;
      plot.append(svgElement("path", { d: `M0 ${y}H${width}`, stroke: color("--grid"), "stroke-width": 1 }));
      write(left - 8, top + y + 4, label.textContent, { "text-anchor": "end" });
    });
    const now = current(chart);
    shapes(now, chart, scale, [width, tall]).forEach(([kind, d]) => {
      const number = /\bc(\d)/.exec(kind)[1];
      const plain = { restart: color("--bad"), checkpoint: color("--ink") }[kind.split(" ")[0]];
      const more = kind.startsWith("restart") ? { "stroke-dasharray": "3 3" } : kind.includes("dashed") ? { "stroke-dasharray": "5 4" } : {};
      if (kind.startsWith("dots")) Object.assign(more, { "stroke-width": 5, "stroke-linecap": "round" });
      if (/raw|bounds/.test(kind)) more.opacity = 0.3;
      plot.append(svgElement("path", { d, stroke: plain || color(`--c${number}`), ...more }));
    });
    root.append(plot);
    area.querySelectorAll(".x").forEach((label) =>
      write(left + parseFloat(label.style.left) / 100 * width, top + tall + 18, label.textContent, { "text-anchor": "middle" }));
    write(left + width / 2, top + tall + 38, area.querySelector(".x-title")?.textContent ?? "", { "text-anchor": "middle" });
    write(0, 0, chart.y_axis, { "text-anchor": "middle", transform: `translate(16 ${top + tall / 2}) rotate(-90)` });
    now.lines.forEach((each, place) => {
      const y = top + tall + 54 + 18 * place;
      root.append(svgElement("path", { d: `M${left} ${y - 4}h18`, stroke: color(`--c${each.color}`), "stroke-width": 2, ...(each.dashed ? { "stroke-dasharray": "5 4" } : {}) }));
      write(left + 26, y, each.name);
    });
    return new XMLSerializer().serializeToString(root);
  };

  const offer = (figure) => {
    const areas = [...figure.querySelectorAll("[data-chart]")];
    if (!areas.length) return;
    const chart = charts[Number(areas[0].dataset.chart)];
    const name = chart.title.replace(/[^\w.-]+/g, "-").slice(0, 60);
    const tools = document.createElement("span");
    tools.className = "tools";
    const button = (text, act) => {
      const element = document.createElement("button");
      element.type = "button";
      element.textContent = text;
      element.title = `download as ${text}`;
      element.addEventListener("click", act);
      tools.append(element);
    };
    button("CSV", () => keep(`${name}.csv`, "text/csv", csv(chart)));
    button("SVG", () => keep(`${name}.svg`, "image/svg+xml", svgText(areas.find((area) => area.getClientRects().length), chart)));
    figure.querySelector("figcaption").append(tools);
  };

  // ---- listening

  document.querySelectorAll("[data-chart]").forEach((area) => {
    const chart = charts[Number(area.dataset.chart)];
    area.addEventListener("pointermove", (event) => show(area, chart, event));
    area.addEventListener("pointerleave", () => hide(area));
  });

  document.querySelectorAll("[data-map]").forEach((area) => {
    const map = charts[Number(area.dataset.map)];
    area.addEventListener("pointermove", (event) => showCell(area, map, event));
    area.addEventListener("pointerleave", () => hide(area));
  });

  document.querySelectorAll("figure").forEach(offer);

  const redrawAll = () => document.querySelectorAll("[data-chart]").forEach(redraw);

  document.querySelectorAll(".switches").forEach((part) => {
    part.hidden = false;
    part.querySelectorAll("[name=axis]").forEach((choice) => choice.addEventListener("change", () => {
      view.axis = choice.value;
      redrawAll();
    }));
    const slider = part.querySelector("#smooth");
    slider.addEventListener("input", () => {
      view.smooth = Number(slider.value);
      part.querySelector("output").textContent = slider.value;
      redrawAll();
    });
    slider.value = 0;  // a browser may remember the choices of an earlier visit
    part.querySelector("#axis-step").checked = true;
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
