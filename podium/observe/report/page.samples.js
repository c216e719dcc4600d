"use strict";
// The samples of one run: what the reader looks for, and one group of answers. Texts become text nodes only.
// `state` has the reader's choices, which outlive a redrawn page.
const samplesView = ({ el, number, css, id }, run, state) => {
  const MOST = 500;  // entries of the list; more are found by searching
  const words = (each) => [each.text, ...(each.messages || []).map((message) => message.content)].join("\n");
  const whole = (sample) => [sample.question, sample.answer, ...sample.completions.map(words)].join("\n").toLowerCase();
  const texts = new Map();
  const textOf = (sample) => { if (!texts.has(sample)) texts.set(sample, whole(sample)); return texts.get(sample); };
  const unique = (values) => [...new Set(values)];
  const splits = unique(run.samples.map((sample) => sample.split)), tasks = unique(run.samples.map((sample) => sample.task));
  const steps = unique(run.samples.map((sample) => sample.step));
  const ends = unique(run.samples.flatMap((sample) => sample.completions.map((each) => each.finish_reason)).filter(Boolean));
  const right = (each) => ((each.parts || {}).correct ?? each.reward) > 0;
  const kinds = [["", "all answers"], ["right", "right answers"], ["wrong", "wrong answers"],
    ...(ends.length > 1 ? ends.map((end) => [`ended by ${end}`, `ended by ${end}`]) : [])];
  const fits = (each) => state.kind === "right" ? right(each) : state.kind === "wrong" ? !right(each)
    : !state.kind || `ended by ${each.finish_reason}` === state.kind;
  const found = () => run.samples.filter((sample) => (!state.step || sample.step === Number(state.step)) && (!state.split || sample.split === state.split)
    && (!state.task || sample.task === state.task) && sample.completions.some(fits) && (!state.text || textOf(sample).includes(state.text.toLowerCase())));
  const mean = (sample) => sample.completions.reduce((sum, each) => sum + (each.reward || 0), 0) / Math.max(1, sample.completions.length);

  const pick = (name, label, options) => el("select", { id: id(name), "aria-label": label,
    onchange: (event) => { state[name] = event.target.value; state.chosen = undefined; search(); } },
    ...options.map(([value, text]) => el("option", { value, ...(String(value) === String(state[name] ?? "") ? { selected: "" } : {}) }, text)));
  const plain = (values) => values.map((value) => [value, value]);
  const text = el("input", { type: "search", id: id("text"), placeholder: "search questions and answers", "aria-label": "search questions and answers",
    value: state.text || "", oninput: (event) => { state.text = event.target.value; state.chosen = undefined; search(); } });
  const list = el("select", { class: "groups", "aria-label": "group of answers", id: id("group"),
    onchange: (event) => { state.chosen = shown[event.target.value]; show(); } });
  const walk = (by, label, arrow) => el("button", { type: "button", id: id(label), "aria-label": label, onclick: () => {
    state.chosen = shown[Math.min(shown.length - 1, Math.max(0, shown.indexOf(state.chosen) + by))]; show(); } }, arrow);
  const back = walk(-1, "previous group", "‹"), on = walk(1, "next group", "›");
  const count = el("p", { class: "soft", role: "status" }), box = el("div");
  let shown = [];

  // After the page is redrawn its samples are new objects: the chosen one is found again by what it is.
  const same = (a, b) => a.step === b.step && a.split === b.split && a.task === b.task && a.prompt === b.prompt;
  const search = () => {
    shown = found();
    const kept = state.chosen && shown.find((sample) => same(sample, state.chosen));
    state.chosen = kept || shown[shown.length - 1];
    list.replaceChildren(...shown.slice(-MOST).map((sample, i) => el("option", { value: Math.max(0, shown.length - MOST) + i },
      `step ${sample.step}, ${sample.split}: ${String(sample.question).slice(0, 60)}, ${number(mean(sample), 3)}`)));
    const recorded = run.recorded_samples > run.samples.length ? `; ${run.recorded_samples} were recorded` : "";
    const listed = shown.length > MOST ? `, the last ${MOST} are listed` : "";
    count.textContent = `${shown.length} of ${run.samples.length} groups${listed}${recorded}`;
    show();
  };
  const show = () => {
    const sample = state.chosen, place = shown.indexOf(sample);
    list.hidden = back.hidden = on.hidden = !sample;
    if (!sample) { box.replaceChildren(el("p", {}, "No group has what you look for.")); return; }
    list.value = place;
    back.disabled = place === 0;
    on.disabled = place === shown.length - 1;
    const again = run.samples.filter((other) => same({ ...other, step: sample.step }, sample));
    const answers = sample.completions.filter(fits), fewer = answers.length < sample.completions.length;
    box.replaceChildren(el("div", { class: "card" }, el("h3", {}, "question"), el("div", { class: "text" }, String(sample.question)),
      el("h3", {}, "expected"), el("div", { class: "text" }, String(sample.answer ?? ""))),
      ...(again.length > 1 ? [el("div", { class: "controls" }, "The same prompt earned:", ...again.map((other) =>
        el("button", { type: "button", onclick: () => jump(other), ...(other === sample ? { "aria-current": "true" } : {}) }, `step ${other.step}: ${number(mean(other), 3)}`)))] : []),
      ...(fewer ? [el("p", { class: "soft" }, `${answers.length} of ${sample.completions.length} answers`)] : []),
      ...answers.map(completion));
  };
  const jump = (sample) => {  // to a group that the filters may leave out
    if (!shown.includes(sample)) {
      for (const name of ["step", "split", "task", "kind", "text"]) state[name] = "";
      controls.querySelectorAll("select:not(.groups), input").forEach((control) => { control.value = ""; });
    }
    state.chosen = sample;
    search();
  };
  const completion = (each) => {
    const parts = Object.entries(each.parts || {}).map(([name, value]) => `${name} ${number(value, 3)}`).join(", ");
    const facts = [parts, each.advantage === undefined ? null : `advantage ${number(each.advantage, 3)}`, each.finish_reason && `ended by ${each.finish_reason}`, each.tokens === undefined ? null : `${each.tokens} tokens`];
    const body = el("div", { class: "text" });
    const talk = Array.isArray(each.messages) ? transcript(each) : [];
    if (each.pieces && each.logprobs) {
      body.classList.add("tokens");
      each.pieces.forEach((piece, i) => {
        const logprob = each.logprobs[i], span = el("span", { title: `${JSON.stringify(piece)} log-prob ${logprob}` }, piece);
        span.style.background = `rgba(${css("--token")}, ${Math.min(0.75, -logprob / 6).toFixed(2)})`;
        body.append(span);
      });
    } else if (!talk.length) body.append(String(each.text));
    const drawn = talk.length && body.childNodes.length ? [el("h3", {}, "tokens that were trained"), body] : talk.length ? [] : [body];
    return el("div", { class: "card" }, el("p", {}, el("span", { class: right(each) ? "right" : "wrong" }, `reward ${number(each.reward, 3)}`),
      el("span", { class: "soft" }, facts.filter(Boolean).map((fact) => ` · ${fact}`).join(""))), ...talk, ...drawn);
  };
  const transcript = (each) => {
    let turn = 0;
    return each.messages.flatMap((message) => {
      const said = message.role === "assistant", paid = said ? (each.turn_rewards || [])[turn++] : undefined;
      const calls = (message.tool_calls || []).map((call) => `${call.function.name}(${JSON.stringify(call.function.arguments)})`);
      const who = said ? `turn ${turn}, drawn and trained${paid === undefined || paid === null ? "" : `, reward ${number(paid, 3)}`}` : `${message.name || message.role}, given`;
      return [el("h3", { class: said ? "" : "soft" }, who), el("div", { class: "text" }, [String(message.content || ""), ...calls].filter(Boolean).join("\n"))];
    });
  };

  const controls = el("div", { class: "controls" }, text,
    ...(splits.length > 1 ? [pick("split", "split", [["", "train and eval"], ...plain(splits)])] : []),
    ...(tasks.length > 1 ? [pick("task", "task", [["", "every task"], ...plain(tasks)])] : []),
    pick("kind", "answers", kinds), pick("step", "step", [["", "every step"], ...steps.map((step) => [step, `step ${step}`])]));
  search();
  return [controls, count, el("div", { class: "controls group" }, back, list, on), box];
};
