// The page: what the reader chose, the bar in which it is chosen, and the address that keeps it.
(() => {
  const { DRAW, node, runColour, counted, tipBox, showTip, hideTip } = charts;
  const data = JSON.parse(document.getElementById("charts").textContent);
  const root = document.documentElement;
  const every = Object.values(data.panels);
  // Arrays that several series have stand in the page once.
  for (const panel of every) for (const series of panel.series || []) if (!Array.isArray(series.v)) series.v = data.shared[series.v];

  // ── state and address ────────────────────────────────────────────────────────────────────────────────────────────
  const lastStep = data.steps.length ? data.steps[data.steps.length - 1] : null;
  const wide = data.steps.length > 3 && data.steps[Math.floor(data.steps.length / 2)] < lastStep / 4;
  const fresh = () => ({
    step: lastStep, hidden: new Set(), probe: "", block: "", head: "", focus: 0, x: wide ? "log" : "lin",
    ylog: new Set(), zoom: null, seeds: "band", at: "",
  });
  let state = fresh();

  const numbers = text => text.split(",").map(Number);
  const read = () => {
    const found = fresh();
    let text;
    try {
      text = decodeURIComponent(location.hash.slice(1));
    } catch {
      return found; // a damaged address shows the whole view
    }
    // A plain fragment is a place in the page.
    if (text && !text.includes("=")) return { ...found, at: text };
    const given = new URLSearchParams(text);
    const whole = (name, within) => given.has(name) && within(+given.get(name)) ? +given.get(name) : found[name];
    found.step = whole("step", v => Number.isFinite(v) && lastStep !== null);
    found.focus = whole("focus", v => v in data.runs);
    if (given.has("hide")) found.hidden = new Set(numbers(given.get("hide")).filter(run => run in data.runs));
    for (const name of ["probe", "block", "head", "at"]) found[name] = given.get(name) || "";
    if (["log", "lin"].includes(given.get("x"))) found.x = given.get("x");
    if (given.get("seeds") === "lines") found.seeds = "lines";
    if (given.has("ylog")) found.ylog = new Set(given.get("ylog").split(",").filter(id => id in data.panels));
    const zoom = given.has("zoom") ? numbers(given.get("zoom")) : [];
    if (zoom.length === 2 && zoom.every(Number.isFinite) && zoom[0] < zoom[1]) found.zoom = zoom;
    return found;
  };
  const write = () => {
    const plain = fresh(), kept = new URLSearchParams();
    for (const name of ["step", "focus", "probe", "block", "head", "x", "seeds", "at"])
      if (state[name] !== plain[name] && state[name] !== null) kept.set(name, state[name]);
    if (state.hidden.size) kept.set("hide", [...state.hidden].sort((a, b) => a - b).join(","));
    if (state.ylog.size) kept.set("ylog", [...state.ylog].join(","));
    if (state.zoom) kept.set("zoom", state.zoom.join(","));
    const text = kept.toString().replaceAll("%2C", ",");
    if (text !== location.hash.slice(1)) history.replaceState(null, "", text ? "#" + text : location.pathname + location.search);
  };

  // ── panels ───────────────────────────────────────────────────────────────────────────────────────────────────────
  const drawn = new Map();
  const visible = box => box.offsetParent !== null;
  // What a screen reader calls a panel: its title, or the words of its still picture.
  const nameOf = figure => data.panels[figure.dataset.panel].title
    || figure.querySelector('.still [role="img"]')?.getAttribute("aria-label") || "";
  // Among more runs than colours the one that the reader points at has a colour, else the chosen one.
  const isCrowded = data.run_colours.includes(null);
  const point = run => {
    const pointed = run ?? state.focus;
    if (!isCrowded || pointed === data.pointed) return;
    data.pointed = pointed;
    for (const { plot } of drawn.values()) plot?.redraw(false);
  };
  const draw = figure => {
    const id = figure.dataset.panel, panel = data.panels[id];
    if (!DRAW[panel.kind]) return;
    const box = figure.querySelector(".live");
    drawn.get(id)?.plot?.destroy();
    const axis = (log, canLog) => {
      const press = figure.querySelector(".ylog");
      press.setAttribute("aria-pressed", String(log));
      press.disabled = !canLog;
    };
    const plot = DRAW[panel.kind]({ id, ...panel }, box, state, data, { zoom: zoom => change({ zoom }), axis, point });
    for (const made of box.querySelectorAll("canvas, .u-over")) {
      made.setAttribute("role", made.tagName === "CANVAS" ? "img" : "group");
      made.setAttribute("aria-label", made.tagName === "CANVAS" ? nameOf(figure) : `${nameOf(figure)}: arrow keys read its points`);
    }
    const ofAll = figure.querySelector(".of-all"), isDeep = s => s.axes.some(axis => ["layer", "head"].includes(axis[0]));
    if (ofAll) ofAll.hidden = (state.block !== "" || state.head !== "") && panel.series.some(isDeep);
    drawn.set(id, { plot, width: box.clientWidth });
  };
  const figures = [...document.querySelectorAll("[data-panel]")].filter(figure => DRAW[data.panels[figure.dataset.panel].kind]);
  figures.forEach(figure => figure.classList.add("alive"));
  const stale = new Set(figures);
  // What is folded away, or far below, is drawn when it comes into sight.
  const near = new IntersectionObserver(entries => {
    for (const entry of entries) {
      entry.target.inSight = entry.isIntersecting;
      if (entry.isIntersecting && stale.delete(entry.target)) draw(entry.target);
    }
  }, { rootMargin: "400px" });
  const redraw = () => {
    state.shown = data.runs.length - state.hidden.size;
    for (const figure of figures) {
      stale.add(figure);
      if (figure.inSight && visible(figure)) { stale.delete(figure); draw(figure); }
    }
  };
  const change = changes => {
    const onlyStep = Object.keys(changes).every(name => name === "step");
    Object.assign(state, changes);
    if (changes.hidden && state.hidden.has(state.focus)) {
      const open = data.runs.findIndex((_, run) => !state.hidden.has(run));
      state.focus = Math.max(open, 0);
    }
    data.pointed = state.focus;
    write();
    fill();
    if (!onlyStep) { redraw(); return; }
    for (const figure of figures) {
      const panel = data.panels[figure.dataset.panel], held = drawn.get(figure.dataset.panel);
      if (panel.kind === "curves" && panel.x === "step") { held?.plot?.redraw(false); continue; }
      stale.add(figure);
      if (figure.inSight && visible(figure)) { stale.delete(figure); draw(figure); }
    }
  };

  // ── the bar of controls ──────────────────────────────────────────────────────────────────────────────────────────
  const bar = document.getElementById("controls");
  const labelled = (text, control) => {
    const label = node("label");
    label.append(node("span", "", text), control);
    return label;
  };
  const choice = (name, title, options) => {
    const select = node("select");
    select.id = `choose-${name}`;
    for (const [value, text] of options) {
      const option = node("option", "", text);
      option.value = value;
      select.append(option);
    }
    select.addEventListener("change", () => change({ [name]: name === "focus" ? +select.value : select.value }));
    bar.append(labelled(title, select));
    updates.push(() => { select.value = String(state[name]); });
  };
  const button = (text, title, press) => {
    const made = node("button", "", text);
    made.type = "button";
    made.title = title;
    made.addEventListener("click", press);
    return made;
  };
  const updates = [];
  const fill = () => updates.forEach(update => update());
  const coordinates = name => [...new Set(every.flatMap(panel => (panel.series || []).flatMap(series => {
    const axis = series.axes.find(a => a[0] === name);
    return axis && panel.x !== name ? axis[1] : [];
  })))].sort((a, b) => a - b);

  const makeBar = () => {
    if (data.steps.length > 1) {
      const slider = node("input");
      Object.assign(slider, { type: "range", min: 0, max: data.steps.length - 1, step: 1, id: "scrub" });
      const told = node("output", "", "");
      told.id = "step";
      const tokens = data.runs.map(run => run.tokens).find(Boolean) || {};
      slider.addEventListener("input", () => change({ step: data.steps[+slider.value] }));
      const label = labelled("measured step", slider);
      label.className = "scrub";
      bar.append(label, told);
      updates.push(() => {
        const index = data.steps.reduce((found, step, i) => step <= state.step ? i : found, 0), step = data.steps[index];
        slider.value = index;
        const seen = tokens[step] ? `, ${counted(tokens[step])} tokens` : "";
        told.textContent = (step === 0 ? `0, ${(data.runs[0] || { start: "at birth" }).start.replace(/^at /, "")}` : `${step}`) + seen;
        slider.setAttribute("aria-valuetext", told.textContent);
      });
    }
    const probes = [...new Set(every.flatMap(panel => (panel.series || []).map(s => s.probe).filter(Boolean)))];
    if (probes.length > 1) choice("probe", "probe", [["", "all"], ...probes.map(p => [p, p])]);
    const blocks = coordinates("layer"), heads = coordinates("head");
    if (blocks.length > 1) choice("block", "block", [["", "all"], ...blocks.map(b => [b, b === 0 ? "0, embedding" : b])]);
    if (heads.length > 1) choice("head", "head", [["", "mean"], ...heads.map(h => [h, h])]);
    const stepped = every.some(panel => panel.kind === "curves" && panel.x === "step");
    if (stepped) choice("x", "steps", [["lin", "linear"], ["log", "log"]]);
    const grouped = data.runs.some((run, i) => run.group && data.runs.findIndex(r => r.group === run.group) < i);
    if (grouped) choice("seeds", "seeds", [["band", "band"], ["lines", "lines"]]);
    const focused = every.some(panel => panel.kind === "heatmap" || panel.kind === "ranking");
    if (data.runs.length > 1 && focused) choice("focus", "maps and tokens of", data.runs.map((run, i) => [i, run.name]));
    if (data.runs.length || data.steps.length) {
      const reset = button("reset", "Back to the whole view", () => change(fresh()));
      reset.id = "reset";
      bar.append(reset);
    }
    if (data.runs.length > 1) {
      const chips = node("div", "chips"), grey = data.runs.filter((_, i) => data.run_colours[i] === null).length;
      let open = grey === 0;
      data.runs.forEach((run, i) => {
        const place = data.run_colours[i];
        const chip = button(run.role ? `${run.name} (${run.role})` : run.name, "Show or hide this run", () => {
          const hidden = new Set(state.hidden);
          if (!hidden.delete(i)) hidden.add(i);
          change({ hidden });
        });
        chip.dataset.run = i;
        updates.push(() => {
          chip.setAttribute("aria-pressed", String(!state.hidden.has(i)));
          chip.hidden = !open && place === null && i !== state.focus;
          chip.style.setProperty("--c", place !== null ? `var(--run-${place % 6})` : i === state.focus ? "var(--run-3)" : "var(--muted)");
        });
        for (const [event, run] of [["mouseenter", i], ["focus", i], ["mouseleave", null], ["blur", null]]) chip.addEventListener(event, () => point(run));
        chips.append(chip);
      });
      if (grey) {
        const more = button(`all ${data.runs.length} runs`, "Show or hide the names of the grey runs", () => { open = !open; fill(); });
        updates.push(() => more.setAttribute("aria-expanded", String(open)));
        more.className = "more";
        chips.append(more);
      }
      bar.append(chips);
    }
  };

  // A panel's own switch between a linear and a logarithmic y: what is drawn says which it is.
  const makeSwitches = () => {
    for (const figure of figures) {
      const id = figure.dataset.panel, panel = data.panels[id];
      if (panel.kind !== "curves") continue;
      const press = button("log", "Logarithmic or linear", () => {
        const ylog = new Set(state.ylog);
        if (!ylog.delete(id)) ylog.add(id);
        change({ ylog });
      });
      press.className = "ylog";
      press.setAttribute("aria-label", `log scale: ${nameOf(figure)}`);
      figure.querySelector(".bar").append(press);
    }
  };

  // ── places in the page ───────────────────────────────────────────────────────────────────────────────────────────
  const goTo = id => {
    const place = document.getElementById(id);
    if (!place) return;
    for (let outer = place; outer; outer = outer.parentElement) if (outer.tagName === "DETAILS") outer.open = true;
    const inner = place.querySelector(":scope > details");
    if (inner) inner.open = true;
    place.scrollIntoView();
  };
  document.addEventListener("click", event => {
    const link = event.target.closest?.('a[href^="#"]');
    if (!link) return;
    event.preventDefault();
    change({ at: link.getAttribute("href").slice(1) });
    goTo(state.at);
  });
  addEventListener("hashchange", () => { state = read(); data.pointed = state.focus; fill(); redraw(); if (state.at) goTo(state.at); });
  document.addEventListener("mousemove", event => {
    const told = event.target.closest?.("[data-tip]");
    if (told) showTip(event.clientX, event.clientY, told.dataset.tip.split("\n").map(line => node("div", "", line)));
    else if (!event.target.closest?.(".u-over")) hideTip();
  });
  document.addEventListener("toggle", event => {
    if (event.target.open) for (const figure of event.target.querySelectorAll(".panel.alive"))
      if (visible(figure) && stale.delete(figure)) draw(figure);
  }, true);

  new ResizeObserver(() => {
    for (const figure of figures) {
      const held = drawn.get(figure.dataset.panel), width = figure.querySelector(".live").clientWidth;
      if (!held?.plot || !width || width === held.width) continue;
      held.width = width;
      held.plot.setSize({ width, height: held.plot.height });
    }
  }).observe(document.body);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  root.classList.add("scripted");
  document.body.append(tipBox);
  if (bar) makeBar();
  makeSwitches();
  state = read();
  state.shown = data.runs.length - state.hidden.size;
  data.pointed = state.focus;
  fill();
  figures.forEach(figure => near.observe(figure));
  if (state.at) goTo(state.at);
})();
