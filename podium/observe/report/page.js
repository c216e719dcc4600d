"use strict";
// Draws the report's JSON object, and draws it anew when the server of a live page reports a change.
// Texts reach the document as text nodes only.
(() => {
  const main = document.getElementById("main");
  const state = { axis: "step", smooth: true, sync: false, chosen: {}, samples: {} };
  const live = document.body.dataset.live;  // names of a served page's runs, as a path
  let stopWatching = () => {};
  const render = (data) => {
  stopWatching();
  const held = document.activeElement, at = held && held.id ? { id: held.id, from: held.selectionStart, to: held.selectionEnd } : null;
  main.style.minHeight = `${main.offsetHeight}px`;  // so that the reader's place stays
  main.replaceChildren();
  const contents = document.getElementById("contents");
  contents.replaceChildren();
  // Okabe and Ito's palette, without black and yellow: told apart by colour-blind readers, on light and on dark.
  const COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F7F7F", "#9467BD"];
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const several = data.runs.length > 1;
  const hovers = matchMedia("(hover: hover)").matches;  // a finger scrolls the page: no bar of buttons, no zoom by dragging
  const charts = [];

  const el = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  };
  if (live) contents.append(el("a", { href: "/" }, "← all runs"));
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const number = (value, digits = 4) =>
    value === null || value === undefined ? "–" : Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 6 });
  const clock = (seconds) => {
    if (seconds === null || seconds === undefined) return "–";
    const whole = Math.round(seconds), parts = [[Math.floor(whole / 3600), "h"], [Math.floor(whole / 60) % 60, "min"], [whole % 60, "s"]];
    const first = parts.findIndex(([count]) => count > 0);  // two units say enough
    return first < 0 ? "0 s" : parts.slice(first, first + 2).map((part) => part.join(" ")).join(" ");
  };
  const section = (id, title) => {
    const node = el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title));
    main.append(node);
    contents.append(el("a", { href: `#${id}` }, title));
    return node;
  };
  const table = (head, rows, numeric = [], kind = "") => {  // kind "stack": on a phone each row is a card
    const cells = (tag, row) => row.map((cell, i) => el(tag, { ...(numeric.includes(i) ? { class: "number" } : {}), ...(tag === "td" ? { "data-label": head[i] } : {}) }, cell));
    return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table, scrolls sideways" },
      el("table", { class: kind }, el("thead", {}, el("tr", {}, ...cells("th", head))),
        el("tbody", {}, ...rows.map((row) => el("tr", {}, ...cells("td", row))))));
  };
  const breakable = (key) => el("span", {}, ...key.split(/(?<=[._])/).flatMap((part) => [part, el("wbr")]));
  const pick = (label, id, options, chosen, change) => el("label", {}, label + " ", el("select", { id, onchange: (event) => change(event.target.value) },
    ...options.map(([value, text]) => el("option", { value, ...(String(value) === String(chosen) ? { selected: "" } : {}) }, text))));

  // The x axis: steps, generated tokens, or hours, by the run's own metrics.
  const cumulative = (run, name) => {
    const series = run.metrics[name], found = new Map();
    let sum = 0;
    if (series) series.steps.forEach((step, i) => { sum += series.values[i]; found.set(step, sum); });
    return found;
  };
  const axes = data.runs.map((run) => {
    const wall = run.metrics["time/wall_s"], hours = new Map();
    if (wall) wall.steps.forEach((step, i) => hours.set(step, wall.values[i] / 3600));
    return { tokens: cumulative(run, "rollout/completion_tokens"), hours };
  });
  const position = (index, step) => {
    if (state.axis === "step") return step;
    const known = axes[index][state.axis];
    return known.has(step) ? known.get(step) : step === 0 ? 0 : null;
  };
  const smoothed = (values) => {
    const window = Math.max(1, Math.round(values.length / 30)), out = [];
    let sum = 0;
    values.forEach((value, i) => {
      sum += value - (i >= window ? values[i - window] : 0);
      out.push(sum / Math.min(i + 1, window));
    });
    return out;
  };

  const FROM_ZERO = ["fraction", "GiB", "cores", "tokens", "tokens/s"];  // units whose small changes would look large
  const layout = (unit, { xaxis = {}, yaxis = {}, ...more } = {}) => ({
    margin: { l: 52, r: 12, t: 6, b: 36 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: css("--ink"), size: 12, family: "system-ui, sans-serif" }, hovermode: "x unified",
    hoverlabel: { bgcolor: css("--shade"), font: { color: css("--ink") } },
    legend: { orientation: "h", traceorder: "normal", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } }, dragmode: hovers ? "zoom" : false,
    modebar: { orientation: "v", bgcolor: "rgba(0,0,0,0)", color: css("--soft"), activecolor: css("--ink") },
    xaxis: { gridcolor: css("--line"), zeroline: false, title: { text: { step: "step", tokens: "generated tokens", hours: "hours" }[state.axis], standoff: 4 }, ...xaxis },
    yaxis: { gridcolor: css("--line"), zeroline: false, exponentformat: "e", rangemode: FROM_ZERO.includes(unit) ? "tozero" : "normal", title: { text: unit, standoff: 4 }, ...yaxis }, ...more,
  });
  const config = { responsive: true, displaylogo: false, displayModeBar: hovers ? "hover" : false, modeBarButtonsToRemove: ["lasso2d", "select2d", "toImage", "sendDataToCloud"] };

  const groups = data.comparison ? data.comparison.groups : data.runs.map((_, i) => [i]);
  const colourOf = (index) => COLOURS[index % COLOURS.length];
  const bands = (line, colour, dash, group, label) => {  // seeds folded into mean and band
    const byStep = new Map();
    for (const index of group) {
      const series = data.runs[index].metrics[line.metric];
      if (series) series.steps.forEach((step, i) => {
        if (!byStep.has(step)) byStep.set(step, []);
        byStep.get(step).push(series.values[i]);
      });
    }
    const steps = [...byStep.keys()].sort((a, b) => a - b), x = steps.map((step) => position(group[0], step));
    const values = steps.map((step) => byStep.get(step));
    const mean = values.map((all) => all.reduce((a, b) => a + b, 0) / all.length);
    const end = (pick, fill) => ({ x, y: values.map((all) => pick(...all)), mode: "lines", line: { width: 0 }, hoverinfo: "skip",
      showlegend: false, ...(fill ? { fill: "tonexty", fillcolor: colour + "33" } : {}) });
    return [end(Math.min, false), end(Math.max, true),
      { x, y: mean, mode: "lines", name: label, showlegend: false, line: { color: colour, width: 2, dash } }];
  };
  const lines = (chart) => {
    // Of several runs the colours are explained once, above the curves; a chart's own legend has its kinds of lines.
    const kinds = several && chart.lines.length > 1 ? chart.lines : [];
    const traces = kinds.map((line, l) => ({ x: [null], y: [null], mode: "lines", name: line.label, line: { color: css("--soft"), width: 2, dash: DASHES[l % DASHES.length] } }));
    groups.forEach((group, g) => chart.lines.forEach((line, l) => {
      const colour = colourOf(several ? g : l), dash = DASHES[(several ? l : 0) % DASHES.length];
      const present = group.filter((index) => data.runs[index].metrics[line.metric]);
      if (!present.length) return;
      const who = several ? data.runs[present[0]].name + (present.length > 1 ? ` and ${present.length - 1} more` : "") : "";
      const label = [who, chart.lines.length > 1 || !several ? line.label : ""].filter(Boolean).join(": ");
      if (present.length > 1) { traces.push(...bands(line, colour, dash, present, label)); return; }
      const series = data.runs[present[0]].metrics[line.metric], x = series.steps.map((step) => position(present[0], step));
      const sparse = series.values.length < 40, mode = sparse ? "lines+markers" : "lines";
      const show = state.smooth && !sparse;
      if (show) traces.push({ x, y: series.values, mode: "lines", line: { color: colour, width: 1 }, opacity: 0.3, hoverinfo: "skip", showlegend: false });
      traces.push({ x, y: show ? smoothed(series.values) : series.values, mode, name: label, showlegend: !several && chart.lines.length > 1,
        line: { color: colour, width: 2, dash }, marker: { size: 5 } });
    }));
    return traces;
  };
  const stacked = (chart) => chart.lines.filter((line) => data.runs[0].metrics[line.metric]).map((line, l) => {
    const series = data.runs[0].metrics[line.metric];
    return { x: series.steps.map((step) => position(0, step)), y: series.values, name: line.label, stackgroup: "all", mode: "lines",
      line: { width: 0.5, color: COLOURS[l % COLOURS.length] }, fillcolor: COLOURS[l % COLOURS.length] + "99" };
  });
  const addChart = (parent, chart, make = lines, wide = false) => {
    const node = el("div", { class: wide ? "chart wide" : "chart", role: "img", "aria-label": `chart: ${chart.title}` });
    const what = chart.lines.map((line) => line.metric).filter((name) => data.definitions[name])
      .map((name) => `${name}: ${data.definitions[name]}`).join("\n");
    parent.append(el("figure", { title: what }, el("h3", {}, chart.title), node));
    charts.push({ node, chart, make });
    return node;
  };
  const draw = (item) => {
    const size = document.documentElement.classList.contains("printing") ? { width: item.node.clientWidth } : {};
    Plotly.react(item.node, item.make(item.chart), { ...layout(item.chart.unit, item.more), ...size }, config);
    if (item.linked || item.more) return;
    item.linked = true;
    item.node.on("plotly_relayout", (event) => {  // zooming one zooms all
      if (state.sync || !("xaxis.range[0]" in event || "xaxis.autorange" in event)) return;
      state.sync = true;
      const change = "xaxis.autorange" in event ? { "xaxis.autorange": true } : { "xaxis.range": [event["xaxis.range[0]"], event["xaxis.range[1]"]] };
      Promise.all(charts.filter((other) => other !== item && other.drawn && !other.more).map((other) => Plotly.relayout(other.node, change)))
        .finally(() => { state.sync = false; });
    });
  };
  const drawOnce = (item) => { if (!item.drawn) { item.drawn = true; draw(item); } };
  const redraw = () => charts.filter((item) => item.drawn).forEach(draw);
  const watcher = new IntersectionObserver((entries) => entries.forEach((entry) => {  // charts in view come first
    const item = charts.find((each) => each.node === entry.target);
    if (entry.isIntersecting && item) drawOnce(item);
  }), { rootMargin: "300px" });
  let waiting = 0;
  const drawRest = () => {  // one by one, so that the page answers in between
    const item = charts.find((each) => !each.drawn);
    if (item) { drawOnce(item); waiting = setTimeout(drawRest, 0); }
  };
  const printing = (on) => {  // on paper: light, and as wide as an A4 page
    document.documentElement.classList.toggle("printing", on);
    charts.forEach((item) => { item.drawn = true; draw(item); });
  };
  const beforePrint = () => printing(true), afterPrint = () => printing(false);

  const csv = () => {  // a line for each step of each run
    const metrics = [...new Set(data.runs.flatMap((run) => Object.keys(run.metrics)))];
    const cell = (value) => /[",\r\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value;
    const rows = data.runs.flatMap((run) => {
      const byStep = new Map();
      metrics.forEach((name, column) => {
        const series = run.metrics[name];
        if (series) series.steps.forEach((step, i) => {
          if (!byStep.has(step)) byStep.set(step, Array(metrics.length).fill(""));
          byStep.get(step)[column] = series.values[i];
        });
      });
      return [...byStep.keys()].sort((a, b) => a - b).map((step) => [run.name, step, ...byStep.get(step)]);
    });
    return [["run", "step", ...metrics], ...rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";
  };
  const save = (name, text) => {
    const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    el("a", { href: url, download: name.replace(/[^\w.-]+/g, "_") }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  };

  // Headline: tiles of one run, or a table of several
  const names = data.runs.map((run) => run.name);
  document.title = `Podium: ${names.join(", ")}`;
  document.getElementById("title").textContent = several ? `${names.length} runs` : names[0];
  const linked = (index) => live ? el("a", { href: `/runs/${live.split("/")[index]}` }, names[index]) : names[index];
  const range = (interval) => interval.length === 2 ? `95 % interval ${interval[0].toFixed(3)} to ${interval[1].toFixed(3)}` : "";
  const gains = (run) => {  // [what, value, more] of a run
    const h = run.headline, found = [];
    h.tasks.forEach((task) => {
      const on = task.task ? ` on ${task.task}` : "";
      found.push([`accuracy${on}`, `${task.first[1].toFixed(3)} → ${task.last[1].toFixed(3)}`, [`step ${task.first[0]} to ${task.last[0]}`, range(task.interval)].filter(Boolean).join(", ")]);
      if (task.avg_at_k !== null) found.push([`avg@${h.samples}${on}`, number(task.avg_at_k), ""]);
      if (task.pass_at_k !== null) found.push([`pass@${h.samples}${on}`, number(task.pass_at_k), ""]);
    });
    if (h.reward) found.push(["mean reward", `${number(h.reward[0], 3)} → ${number(h.reward[1], 3)}`, "first and last step"]);
    found.push(["steps", `${h.steps}${h.planned_steps ? ` of ${h.planned_steps}` : ""}`, ""]);
    found.push(["wall time", clock(h.wall_s), ""], ["CPU time", clock(h.cpu_s), ""]);
    if (h.generated_tokens !== null) found.push(["tokens generated", number(h.generated_tokens), ""]);
    if (h.padding !== null) found.push(["padding of updates", `${(100 * h.padding).toFixed(0)} %`, ""]);
    return found;
  };
  const made = (run) => [["model", run.headline.model], ["recipe", run.headline.recipe], ["machine", run.headline.machine], ["commit", run.headline.commit]]
    .filter((fact) => fact[1]).map((fact) => fact.join(" ")).join(" · ");
  const heads = section("headline", "Did it learn?");
  if (several) {
    const all = data.runs.map((run) => new Map(gains(run).map(([what, value]) => [what, value])));
    const whats = [...new Set(all.flatMap((own) => [...own.keys()]))];
    heads.append(table(["run", ...whats], all.map((own, i) => [linked(i), ...whats.map((what) => own.get(what) ?? "–")]), [], "stack"));
    const facts = [...new Set(data.runs.map(made))];
    facts.forEach((fact) => heads.append(el("p", { class: "soft" }, facts.length > 1 ? `${names.filter((_, i) => made(data.runs[i]) === fact).join(", ")}: ${fact}` : fact)));
  } else {
    heads.append(el("div", { class: "tiles" }, ...gains(data.runs[0]).map(([what, value, more]) =>
      el("div", { class: "tile" }, el("b", {}, value), el("span", {}, more ? `${what}, ${more}` : what)))), el("p", { class: "soft" }, made(data.runs[0])));
  }

  // Problems with the files
  if (data.runs.some((run) => run.problems.length)) {
    const node = section("files", "Missing or damaged");
    data.runs.forEach((run) => run.problems.forEach((text) => node.append(el("p", { class: "card problem" }, several ? `${run.name}: ${text}` : text))));
  }

  // Comparison
  if (data.comparison) {
    const node = section("comparison", "Which is better?"), c = data.comparison;
    const called = (indices) => indices.map((i) => data.runs[i].name).join(", ");
    if (c.metric) node.append(el("p", { class: "soft" }, `by ${c.metric}`),
      table(["runs", "score", "95 % interval over seeds", "against the next"], c.ranking.map((row) => [called(row.runs), number(row.score),
        row.interval ? `${number(row.interval[0])} to ${number(row.interval[1])}` : "one seed", row.against_next || "–"]), [], "stack"));
    const keys = Object.entries(c.differences);
    node.append(keys.length ? table(["setting", ...names], keys.map(([key, values]) => [breakable(key), ...values.map((v) => v === null ? "–" : JSON.stringify(v))]), [], "stack")
      : el("p", {}, "Their settings are the same."));
  }

  // Findings
  const found = section("findings", "What stands out");
  let any = false;
  data.runs.forEach((run) => run.findings.forEach((finding) => {
    any = true;
    found.append(el("div", { class: `card ${finding.level}`, "data-rule": finding.rule }, el("h3", {}, several ? `${run.name}: ${finding.title}` : finding.title),
      el("p", { class: "soft" }, finding.evidence), el("p", {}, finding.advice)));
  }));
  if (!any) found.append(el("p", {}, "No rule found a fault."));

  // Curves
  const curves = section("curves", "Curves");
  curves.append(el("div", { class: "controls" },
    pick("x axis", "axis", [["step", "steps"], ["tokens", "generated tokens"], ["hours", "hours"]], state.axis, (value) => { state.axis = value; redraw(); }),
    el("label", {}, el("input", { type: "checkbox", id: "smooth", ...(state.smooth ? { checked: "" } : {}), onchange: (event) => { state.smooth = event.target.checked; redraw(); } }), " smoothed over raw"),
    el("button", { type: "button", id: "csv", onclick: () => save(`${names.join("-")}.csv`, csv()) }, "Metrics as CSV")));
  if (several) curves.append(el("p", { class: "key" }, ...groups.map((group, g) => {
    const swatch = el("span", { class: "swatch" });
    swatch.style.borderTopColor = colourOf(g);
    return el("span", {}, swatch, `${group.map((index) => names[index]).join(", ")}${group.length > 1 ? ": mean, least and largest" : ""}`);
  })));
  const grid = el("div", { class: "grid" });
  curves.append(grid);
  data.curves.forEach((chart) => addChart(grid, chart));

  // Time and memory
  const work = section("time", "Where the time went");
  if (data.phases && !several) addChart(work, data.phases, stacked, true);
  const workGrid = el("div", { class: "grid" });
  work.append(workGrid);
  data.work.forEach((chart) => addChart(workGrid, chart));
  const middle = (run, name) => {
    const series = run.metrics[name];
    if (!series) return null;
    const values = [...series.values].sort((a, b) => a - b);
    return values[Math.floor(values.length / 2)];
  };
  data.runs.filter((run) => run.plan).forEach((run) => {
    const p = run.plan, measured = { step: middle(run, "time/train/step_s") };
    Object.keys(p.parts).forEach((part) => { measured[part] = middle(run, `time/train/${part}_s`); });
    work.append(el("h3", {}, `Planned and measured${several ? `: ${run.name}` : ""}`), el("p", { class: "soft" }, p.text || ""),
      table(["part", "planned s", "range", "measured s (median)"], [["step", p.seconds], ...Object.entries(p.parts)].map(([part, t]) =>
        [part, number(t.value, 3), `${number(t.low, 3)} to ${number(t.high, 3)}`, number(measured[part], 3)]), [1, 3]));
    if (p.memory.length) work.append(table(["phase", "planned GiB of a device"], p.memory.map(([name, gib]) => [name, number(gib, 3)]), [1]));
  });

  // Learning by prompt, and samples: of one run at a time
  const chosenOf = (node, id, runs, show) => {
    const chosen = runs[state.chosen[id]] ? state.chosen[id] : 0;
    if (runs.length > 1) node.append(el("div", { class: "controls keep" }, pick("run", id, runs.map((run, i) => [i, run.name]), chosen,
      (value) => { state.chosen[id] = Number(value); show(runs[state.chosen[id]]); })));
    show(runs[chosen]);
  };
  const warm = data.runs.filter((run) => run.heat && run.heat.steps.length > 1);
  if (warm.length) {
    const node = section("prompts", "Learning by prompt"), text = el("p", { class: "soft" }), box = el("div", { class: "chart", role: "img", "aria-label": "heat map of prompts over steps" });
    let heat = warm[0].heat;
    const room = innerWidth < 600 ? 15 : 34;
    const rows = () => heat.rows.map((name, i) => `${i + 1} ${name.length > room ? "…" + name.slice(1 - room) : name}`);
    const item = { node: box, chart: { unit: "" }, make: () => [{ type: "heatmap", x: heat.steps, y: rows(), z: heat.values, zmin: 0, zmax: 1,
      customdata: heat.rows.map((name) => heat.steps.map(() => name)), hovertemplate: "%{customdata}<br>step %{x}: %{z:.2f}<extra></extra>",
      colorscale: "Cividis", hoverongaps: false, colorbar: { thickness: 10, outlinewidth: 0 } }],
      more: { margin: { l: 20, r: 8, t: 4, b: 44 }, hovermode: "closest",
        yaxis: { autorange: "reversed", tickfont: { size: 10 }, automargin: true, showgrid: false },
        xaxis: { title: { text: "step", standoff: 8 }, showgrid: false } } };
    charts.push(item);
    chosenOf(node, "prompts-run", warm, (run) => {
      heat = run.heat;
      text.textContent = heat.by_prompt ? "Share of right answers of each recorded prompt that was asked more than once; hardest at the top."
        : "Share of right answers by task; no recorded prompt was asked twice.";
      box.style.height = `${Math.max(170, 70 + 14 * heat.rows.length)}px`;
      if (item.drawn) draw(item);
    });
    node.append(text, box);
  }

  const samples = section("samples", "Samples"), answers = el("div");
  chosenOf(samples, "samples-run", data.runs, (run) => {
    const choices = state.samples[run.name] = state.samples[run.name] || {};
    answers.replaceChildren(...(run.samples.length ? samplesView({ el, number, css, id: (name) => `samples-${name}` }, run, choices)
      : [el("p", {}, "No samples were recorded.")]));
  });
  samples.append(answers);

  // Settings
  const settings = section("settings", "Settings that are not defaults");
  data.runs.forEach((run) => settings.append(...(several ? [el("h3", {}, run.name)] : []),
    run.settings.length ? table(["key", "value", "default"], run.settings.map(([key, ...values]) => [breakable(key), ...values]), [], "stack") : el("p", {}, "None.")));

  charts.forEach((item) => watcher.observe(item.node));
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  waiting = setTimeout(drawRest, 0);
  addEventListener("beforeprint", beforePrint);
  addEventListener("afterprint", afterPrint);
  scheme.addEventListener("change", redraw);
  stopWatching = () => {
    watcher.disconnect();
    clearTimeout(waiting);
    removeEventListener("beforeprint", beforePrint);
    removeEventListener("afterprint", afterPrint);
    scheme.removeEventListener("change", redraw);
    charts.forEach((item) => item.drawn && Plotly.purge(item.node));
  };
  main.style.minHeight = "";
  const again = at && document.getElementById(at.id);  // whoever types a search goes on typing
  if (again) again.focus({ preventScroll: true });
  if (again && typeof at.from === "number") again.setSelectionRange(at.from, at.to);
  document.documentElement.dataset.ready = "yes";
  };

  render(JSON.parse(document.getElementById("data").textContent));
  if (live) {
    const status = document.getElementById("status"), source = new EventSource(`/events/${live}`);
    const chooses = () => CSS.supports("selector(:open)") && document.querySelector("select:open");
    let newest = 0;
    source.onmessage = async (event) => {
      status.textContent = event.data;
      const own = ++newest, answer = await fetch(`/data/${live}`);
      if (!answer.ok) return;
      const data = await answer.json();
      const show = () => { if (own === newest) chooses() ? setTimeout(show, 500) : render(data); };
      show();
    };
    source.addEventListener("state", (event) => { status.textContent = event.data; });
    source.onerror = () => { status.textContent = "not connected; trying again"; };
  }
})();
