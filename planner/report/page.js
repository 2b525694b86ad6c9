"use strict";
// Draws the charts in the colours of the page, and fills the tables that follow what is pointed at.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(pointer: coarse)");
  const narrow = () => window.innerWidth < 600;

  function colours() {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(name).trim();
    return { text: of("--text"), soft: of("--soft"), line: of("--line"), card: of("--card"), paper: of("--paper") };
  }

  function themed() {
    const { text, soft, line, card } = colours();
    const look = { "font.color": text, "hoverlabel.bgcolor": card, "hoverlabel.font.color": text, "hoverlabel.bordercolor": line };
    Object.assign(look, { "modebar.bgcolor": "rgba(0,0,0,0)", "modebar.color": soft, "modebar.activecolor": text });
    for (const axis of ["xaxis", "yaxis", "yaxis2"]) {
      look[`${axis}.gridcolor`] = line;
      look[`${axis}.linecolor`] = line;
      look[`${axis}.color`] = text;
    }
    return look;
  }

  // Words in charts stand on the page's own colour, so that no line goes through them.
  function labelled(layout) {
    const paper = colours().paper;
    return Object.fromEntries((layout.annotations || []).map((_, k) => [`annotations[${k}].bgcolor`, paper]));
  }

  function size(bytes) {
    const sign = bytes < 0 ? "-" : "";
    const whole = Math.abs(bytes), step = data.units[0][1];
    if (whole < step) return `${sign}${whole} B`;
    const [name, each] = data.units.slice(0, -1).find(([, unit]) => whole < (step - 0.5) * unit) || data.units.at(-1);
    const amount = whole / each, digits = amount < 9.995 ? 2 : amount < 99.95 ? 1 : 0;
    return `${sign}${amount.toFixed(digits)} ${name}`;
  }

  function seconds(amount) {
    const [scale, unit] = amount < 0.9995e-3 ? [1e6, "µs"] : amount < 0.9995 ? [1e3, "ms"] : [1, "s"];
    return `${(amount * scale).toPrecision(3)} ${unit}`;
  }

  function row(cells, numbers) {
    const tr = document.createElement("tr");
    cells.forEach((cell, k) => {
      const td = document.createElement("td");
      td.textContent = cell;
      if (k >= cells.length - numbers) td.className = "number";
      tr.append(td);
    });
    return tr;
  }

  const drawn = [];
  for (const element of document.querySelectorAll("[data-figure]")) {
    const figure = data.figures[element.dataset.figure];
    const layout = figure.layout;
    if (touch.matches) { // Fingers scroll; the buttons that zoom have the top for themselves.
      layout.dragmode = false;
      layout.margin.t = 44;
      layout.legend = { ...layout.legend, y: element.dataset.figure === "peaks" ? -0.8 : -0.22, yanchor: "top" };
    }
    if (narrow()) {
      layout.font = { ...(layout.font || {}), size: 11 };
      layout.legend = { ...(layout.legend || {}), font: { size: 10 } };
      layout.height += element.dataset.figure === "timeline" ? 60 : 0;
    }
    const config = { responsive: true, displaylogo: false, displayModeBar: touch.matches || "hover" };
    config.modeBarButtons = [["zoomIn2d", "zoomOut2d", "resetScale2d"]];
    drawn.push(Plotly.newPlot(element, figure.data, layout, config).then(() => Plotly.relayout(element, { ...themed(), ...labelled(layout) })));
  }
  dark.addEventListener("change", () => {
    document.querySelectorAll("[data-figure]").forEach((element) => {
      Plotly.relayout(element, { ...themed(), ...labelled(element.layout) });
    });
  });

  // What is alive at a moment.
  const at = { step: 1, action: 0 };

  function aliveAt(step, action) {
    const sizes = new Map();
    for (const changes of step.changes.slice(0, action + 1)) {
      for (const [label, bytes] of changes) {
        if (bytes) sizes.set(label, bytes); else sizes.delete(label);
      }
    }
    return sizes;
  }

  function labelText([what, op, module], by) {
    if (by === "what") return what;
    if (by === "kind") return op || what;
    if (by === "module") return module || what;
    return [what, op, module].filter((part) => part).join(" · ");
  }

  function showAlive() {
    const step = data.steps[at.step];
    at.action = Math.max(0, Math.min(at.action, step.actions.length - 1));
    const [action, stage, start, end, peak] = step.actions[at.action];
    const names = { optimizer: "the optimizer's step", loss: "the loss" };
    const where = names[action] || `${action} of ${stage}`;
    byId("alive-title").textContent = `${size(peak)} alive in ${where}, at ${seconds((start + end) / 2)} (${at.action + 1} of ${step.actions.length})`;
    const sums = new Map();
    for (const [label, bytes] of aliveAt(step, at.action)) {
      const text = labelText(step.labels[label], byId("alive-by").value);
      sums.set(text, (sums.get(text) || 0) + bytes);
    }
    const rows = [...sums].sort((a, b) => b[1] - a[1]).map(([text, bytes]) => {
      const share = peak ? (100 * bytes) / peak : 0;
      const tr = row([text, size(bytes), `${share.toFixed(0)}%`], 2);
      tr.firstChild.className = "share";
      tr.firstChild.style.setProperty("--part", `${Math.max(0, share)}%`);
      return tr;
    });
    byId("alive-rows").replaceChildren(...rows);
    byId("alive-step").value = String(at.step);
  }

  function point(step, action) {
    at.step = step;
    at.action = action;
    showAlive();
  }

  if (data.steps.length) {
    const chart = byId("chart-timeline");
    const follow = (event) => {
      const hit = event.points.find((each) => Array.isArray(each.customdata));
      if (hit) point(...hit.customdata);
    };
    drawn[0].then(() => { chart.on("plotly_hover", follow); chart.on("plotly_click", follow); });
    byId("alive-before").addEventListener("click", () => point(at.step, at.action - 1));
    byId("alive-after").addEventListener("click", () => point(at.step, at.action + 1));
    byId("alive-peak").addEventListener("click", () => point(at.step, data.steps[at.step].peak));
    byId("alive-by").addEventListener("change", showAlive);
    byId("alive-step").addEventListener("change", (event) => {
      const step = Number(event.target.value);
      point(step, data.steps[step].peak);
    });
    point(1, data.steps[1].peak);
  }

  // The plan at a budget.
  if (data.curve.length) {
    const chart = byId("chart-curve");
    const slider = byId("curve-slider");
    const choose = (number) => {
      const plan = data.curve[number];
      slider.value = String(number);
      byId("curve-title").textContent = plan.text;
      byId("curve-command").textContent = plan.command;
      byId("curve-rows").replaceChildren(...plan.rows.map((cells) => row(cells, 4)));
      Plotly.restyle(chart, { selectedpoints: [[number]], "selected.marker.size": 16, "selected.marker.color": "#D55E00", "unselected.marker.opacity": 1 }, [0]);
    };
    Promise.all(drawn).then(() => {
      chart.on("plotly_click", (event) => {
        const hit = event.points.find((each) => each.curveNumber === 0);
        if (hit) choose(hit.pointNumber);
      });
      slider.addEventListener("input", () => choose(Number(slider.value)));
      choose(data.start);
    });
  }

  Promise.all(drawn).then(() => { document.documentElement.dataset.ready = "yes"; });
})();
