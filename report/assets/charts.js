"use strict";
// Panels: from the numbers of a panel and the reader's choices to what stands in its figure.
const charts = (() => {
  const node = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const runColour = run => run === undefined ? css("--muted") : css(`--run-${run % 6}`);
  const DASHES = { dashed: [5, 3], dotted: [1.5, 2.5], control: [4, 3] };
  const finite = v => v !== null && v !== undefined && Number.isFinite(v);

  const SUPERSCRIPT = "⁰¹²³⁴⁵⁶⁷⁸⁹";
  const raised = n => (n < 0 ? "⁻" : "") + [...String(Math.abs(n))].map(d => SUPERSCRIPT[+d]).join("");
  // A number as its panel was given it: four digits.
  const written = v => {
    if (!finite(v)) return "–";
    const power = v === 0 ? 0 : Math.floor(Math.log10(Math.abs(v)) + 1e-9);
    if (power >= -4 && power < 7) return v.toLocaleString("en-US", { maximumFractionDigits: 12 });
    return `${+(v / 10 ** power).toPrecision(4)}·10${raised(power)}`;
  };
  const counted = v => v >= 1e9 ? `${+(v / 1e9).toPrecision(3)}G` : v >= 1e6 ? `${+(v / 1e6).toPrecision(3)}M`
    : v >= 1e4 ? `${+(v / 1e3).toPrecision(4)}k` : written(v);
  const tick = v => {
    if (v === null || v === undefined) return "";
    if (v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e6)) {
      const power = Math.floor(Math.log10(Math.abs(v)) + 1e-9), lead = +(v / 10 ** power).toPrecision(3);
      return (lead === 1 ? "" : `${lead}·`) + `10${raised(power)}`;
    }
    return v >= 1e4 ? counted(v) : written(+v.toPrecision(4));
  };

  // Axes of whole numbers, and what lies between two ticks of them.
  const WHOLE = ["step", "layer", "head", "position", "place"];
  const INCREMENTS = [1, 2, 5, ...Array.from({ length: 14 }, (_, k) => [1, 2, 2.5, 5].map(n => n * 10 ** (k + 1))).flat()];

  // ── numbers with named axes ──────────────────────────────────────────────────────────────────────────────────────
  const axisOf = (series, name) => series.axes.find(axis => axis[0] === name);

  // Without one axis: at an index of it, or the mean over it.
  const reduce = (series, name, pick) => {
    const place = series.axes.findIndex(axis => axis[0] === name);
    const sizes = series.axes.map(axis => axis[1].length);
    const size = sizes[place], inner = sizes.slice(place + 1).reduce((a, b) => a * b, 1);
    const outer = sizes.slice(0, place).reduce((a, b) => a * b, 1), v = [];
    for (let o = 0; o < outer; o++) for (let i = 0; i < inner; i++) {
      if (pick !== "mean") { v.push(series.v[(o * size + pick) * inner + i]); continue; }
      let sum = 0, count = 0;
      for (let k = 0; k < size; k++) {
        const value = series.v[(o * size + k) * inner + i];
        if (finite(value)) { sum += value; count++; }
      }
      v.push(count ? +(sum / count).toPrecision(4) : null);
    }
    return { ...series, axes: series.axes.filter((_, k) => k !== place), v };
  };

  // The latest index at or before a step.
  const stepIndex = (steps, step) => {
    let found = 0;
    steps.forEach((s, i) => { if (s <= step) found = i; });
    return found;
  };

  const DEEP = ["layer", "head"];
  const isDeep = (series, panel) => series.axes.some(axis => axis[0] !== panel.x && DEEP.includes(axis[0]));

  // The lines of a curve panel: {x, y, name, look, run, colour, faint}.
  const linesOf = (panel, state) => {
    const lines = [], shownRuns = new Set();
    const both = panel.series.some(s => isDeep(s, panel)) && panel.series.some(s => !isDeep(s, panel) && !s.look?.match(/control|band/));
    const chosen = state.block !== "" || state.head !== "";
    for (const given of panel.series) {
      if (given.run !== undefined && state.hidden.has(given.run)) continue;
      const probe = state.probe || panel.lead;
      if (given.probe && probe && given.probe !== probe) continue;
      if (both && !(given.look === "control" || given.look === "band") && isDeep(given, panel) !== chosen) continue;
      let series = given;
      if (panel.x !== "step" && axisOf(series, "step")) series = reduce(series, "step", stepIndex(axisOf(series, "step")[1], state.step));
      let there = true;
      for (const [name, pick] of [["layer", state.block], ["head", state.head]]) {
        if (pick === "" || panel.x === name || !axisOf(series, name)) continue;
        const index = axisOf(series, name)[1].indexOf(+pick);
        if (index < 0) there = false; else series = reduce(series, name, index);
      }
      if (!there || !axisOf(series, panel.x)) continue;
      if (axisOf(series, "head") && panel.x !== "head") {
        const heads = axisOf(series, "head")[1].length;
        if (state.block !== "" && heads > 1 && heads <= 16 && state.shown === 1)
          axisOf(series, "head")[1].forEach((head, i) => expand(reduce(series, "head", i), panel, lines, `head ${head}`, true));
        const choosable = state.block === "" && state.head === "" && heads > 1 && heads <= 16 && state.shown === 1;
        series = reduce(series, "head", "mean");
        expand({ ...series, choosable }, panel, lines, heads > 1 && !choosable ? "mean of heads" : "");
      } else expand(series, panel, lines, "");
      if (given.run !== undefined) shownRuns.add(given.run);
    }
    return lines;
  };

  const expand = (series, panel, lines, suffix, faint = false) => {
    const x = axisOf(series, panel.x)[1];
    const rest = series.axes.filter(axis => axis[0] !== panel.x);
    const walk = (cut, axes, words, depth, text) => {
      if (axes.length) {
        const [name, coordinates] = axes[0];
        coordinates.forEach((c, i) => walk(reduce(cut, name, i), axes.slice(1),
          [...words, name === "text" ? `‹${c}›` : `${name === "layer" ? "block" : name} ${c}`],
          depth ?? (name === "text" ? null : [i, coordinates.length, name, coordinates[0], coordinates[coordinates.length - 1]]),
          name === "text" ? c : text));
        return;
      }
      if (!cut.v.some(finite)) return;
      lines.push({ x, y: cut.v, run: series.run, colour: series.colour, probe: series.probe, look: series.look || "solid", depth, faint, text, choosable: series.choosable,
        plain: [series.name, suffix].filter(Boolean).join(", "),
        name: [series.name, ...words, suffix].filter(Boolean).join(", ") });
    };
    walk(series, rest, [], null);
  };

  // Seeds of one config: the range and the mean of the lines that they share.
  const gather = (lines, data) => {
    const kept = [], groups = new Map();
    for (const line of lines) {
      const group = line.run === undefined ? "" : data.runs[line.run].group;
      if (!group || line.look === "control" || line.look === "band" || line.faint) { kept.push(line); continue; }
      const key = JSON.stringify([group, line.name, line.look, line.depth]);
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(line);
    }
    for (const members of groups.values()) {
      if (members.length < 2) { kept.push(...members); continue; }
      // A step that one of them lacks is left out; one at which one has no number is a gap.
      const x = members[0].x.filter(at => members.every(m => m.x.includes(at))), mean = [], low = [], high = [];
      for (const at of x) {
        const values = members.map(m => m.y[m.x.indexOf(at)]).filter(finite);
        const all = values.length === members.length;
        mean.push(all ? +(values.reduce((a, b) => a + b, 0) / values.length).toPrecision(4) : null);
        low.push(all ? Math.min(...values) : null);
        high.push(all ? Math.max(...values) : null);
      }
      // A group keeps its colour, whichever of its runs are hidden.
      const first = members[0], group = data.runs[first.run].group, all = Object.keys(data.runs).map(Number).filter(run => data.runs[run].group === group);
      const run = all.find(member => data.run_colours[member] !== null) ?? all[0];
      kept.push({ ...first, run, x, y: mean, low, high, members, group,
        name: [first.name === group ? "" : first.name, `mean of ${members.length} seeds`].filter(Boolean).join(", ") });
    }
    return kept;
  };

  // What runs are judged against: one band as wide as the widest, and levels that are the same once.
  const controlsOnce = lines => {
    const kept = [], bands = new Map(), levels = new Set();
    for (const line of lines) {
      if (line.look === "band" && !line.depth) {
        if (bands.has(line.name)) bands.get(line.name).push(line); else bands.set(line.name, [line]);
      } else if (line.look === "control") {
        const key = JSON.stringify([line.name, line.x, line.y]);
        if (!levels.has(key)) kept.push(line);
        levels.add(key);
      } else kept.push(line);
    }
    for (const members of bands.values()) {
      const x = [...new Set(members.flatMap(m => m.x))].sort((a, b) => a - b);
      const widest = at => members.map(m => m.y[m.x.indexOf(at)]).filter(finite).map(Math.abs);
      const y = x.map(at => widest(at).length ? Math.max(...widest(at)) : null);
      kept.push(members.length > 1 ? { ...members[0], run: undefined, x, y } : members[0]);
    }
    return kept;
  };

  // From the first block, 0, to the last, 1.
  const depthColour = (share, ramp) => {
    const at = share * (ramp.length - 1), i = Math.min(Math.floor(at), ramp.length - 2);
    const channel = (colour, k) => parseInt(colour.slice(1 + 2 * k, 3 + 2 * k), 16);
    const mixed = [0, 1, 2].map(k => Math.round(channel(ramp[i], k) + (at - i) * (channel(ramp[i + 1], k) - channel(ramp[i], k))));
    return "#" + mixed.map(c => c.toString(16).padStart(2, "0")).join("");
  };
  const scale = (low, high, colours) => {
    const made = node("div", "scale", low), ramp = node("i");
    ramp.style.background = `linear-gradient(to right, ${colours.join(", ")})`;
    made.append(ramp, high);
    return made;
  };

  const colourOf = (line, single, data) => {
    if (line.look === "control" || line.look === "band" || line.run === undefined && !line.depth) return css("--muted");
    if (line.depth && single) return depthColour(line.depth[0] / Math.max(line.depth[1] - 1, 1), data.depth);
    const place = line.colour ?? (line.run in data.run_colours ? data.run_colours[line.run] : line.run);
    if (place !== null) return runColour(place);
    // One of many runs: grey, unless it is alone or the reader points at it.
    return single || line.run === data.pointed || line.members?.some(member => member.run === data.pointed) ? runColour(data.pointed_colour) : alpha(css("--muted"), 0.3);
  };
  const isGrey = (line, data) => line.run !== undefined && line.colour === undefined && data.run_colours[line.run] === null;

  // Heights as near to places as a distance between any two allows, in their order.
  const spreadApart = (places, gap, low, high) => {
    const order = places.map((_, i) => i).sort((a, b) => places[a] - places[b]), pools = [], found = [];
    gap = Math.min(gap, (high - low) / Math.max(places.length - 1, 1));
    const mean = ([sum, count]) => sum / count;
    order.forEach((i, k) => {
      pools.push([places[i] - gap * k, 1]);
      while (pools.length > 1 && mean(pools.at(-2)) > mean(pools.at(-1))) {
        const [sum, count] = pools.pop();
        pools.at(-1)[0] += sum;
        pools.at(-1)[1] += count;
      }
    });
    const even = pools.flatMap(pool => Array(pool[1]).fill(mean(pool)));
    order.forEach((i, k) => { found[i] = Math.min(Math.max(even[k], low), high - gap * (places.length - 1)) + gap * k; });
    return found;
  };

  // Every token's text and rank at both ends of its path, as far as it is in sight.
  const NAME_WIDTH = 124, NAME_GAP = 11;
  const nameEnds = (u, lines) => {
    const { ctx, bbox } = u, dpr = devicePixelRatio;
    ctx.save();
    ctx.font = `${10 * dpr}px ${css("--mono")}`;
    ctx.textBaseline = "middle";
    ctx.strokeStyle = css("--grid");
    ctx.lineWidth = dpr;
    const { min, max } = u.scales.x, inSight = lines.map(line => line.y.filter((v, i) => finite(v) && line.x[i] >= min && line.x[i] <= max));
    for (const [isLast, away] of [[false, -1], [true, 1]]) {
      const named = lines.map((line, i) => [line, inSight[i].at(isLast ? -1 : 0)]).filter(pair => pair[1] !== undefined);
      const places = named.map(([, rank]) => u.valToPos(rank, "y", true));
      const heights = spreadApart(places, NAME_GAP * dpr, bbox.top, bbox.top + bbox.height), x = bbox.left + (isLast ? bbox.width : 0);
      ctx.textAlign = isLast ? "left" : "right";
      named.forEach(([line, rank], i) => {
        ctx.beginPath();
        ctx.moveTo(x, places[i]);
        ctx.lineTo(x + 9 * away * dpr, heights[i]);
        ctx.stroke();
        // A text from right to left is kept apart from its rank.
        const letters = [...line.text], name = `\u2068‹${letters.length > 10 ? letters.slice(0, 9).join("") + "…" : line.text}›\u2069`;
        ctx.fillStyle = css("--ink");
        ctx.fillText(isLast ? `${name} ${written(rank)}` : `${written(rank)} ${name}`, x + 11 * away * dpr, heights[i]);
      });
    }
    ctx.restore();
  };

  // Points between gaps, of which no line is drawn.
  const lone = values => {
    const held = values.map((_, i) => i).filter(i => values[i] !== undefined);
    return held.filter((i, k) => finite(values[i]) && !finite(values[held[k - 1]]) && !finite(values[held[k + 1]]));
  };

  // ── curves ───────────────────────────────────────────────────────────────────────────────────────────────────────
  const alpha = (colour, share) => colour.startsWith("#") ? colour.slice(0, 7) + Math.round(255 * share).toString(16).padStart(2, "0") : colour;

  const drawCurves = (panel, box, state, data, hooks) => {
    let lines = linesOf(panel, state);
    const single = new Set(lines.map(line => line.run).filter(run => run !== undefined)).size <= 1;
    if (state.seeds !== "lines" && panel.x === "step") lines = gather(lines, data);
    lines = controlsOnce(lines);
    lines.sort((a, b) => isGrey(b, data) - isGrey(a, data));
    box.replaceChildren();
    if (!lines.length) {
      box.append(node("p", "note", "Nothing to draw for this choice."));
      hooks.axis(false, false);
      return null;
    }
    // Linear where no line has anything that a logarithmic axis could show.
    const judged = lines.filter(line => line.look !== "control" && line.look !== "band");
    const canLog = judged.some(line => line.y.some(v => finite(v) && v > 0));
    const log = canLog && panel.log !== state.ylog.has(panel.id);
    hooks.axis(log, canLog);
    const nothing = !lines.some(line => line.y.some(v => finite(v) && v !== 0));
    const xlog = panel.x === "step" ? state.x === "log" : panel.xlog;
    const drawable = v => finite(v) && (!log || v > 0) ? v : null;
    const named = lines.length > 0 && lines.every(line => line.text !== undefined);
    if (lines.some(line => line.choosable)) box.append(node("p", "when", "mean of heads; choose a block to see each"));
    const tables = [], series = [{}], bands = [], owners = [null];
    const add = (x, y, options, owner) => {
      tables.push([x, y.map(drawable)]);
      series.push(options);
      owners.push(owner);
    };
    for (const line of lines) {
      const colour = colourOf(line, single, data), few = line.x.length < 25;
      const invisible = { stroke: "transparent", width: 0, points: { show: false } };
      if (line.look === "band" || line.members) {
        const high = line.members ? line.high : line.y, low = line.members ? line.low : line.y.map(v => finite(v) ? -v : v);
        add(line.x, high, invisible, line.members ? null : line);
        add(line.x, low, invisible, null);
        bands.push({ series: [series.length - 2, series.length - 1], fill: alpha(colour, line.members ? 0.22 : 0.2) });
        if (!line.members) continue;
      }
      add(line.x, line.y, {
        stroke: () => line.faint ? alpha(colourOf(line, single, data), 0.45) : colourOf(line, single, data),
        width: line.look === "control" ? 1.2 : line.faint ? 1 : 1.8, dash: DASHES[line.look],
        points: {
          show: few && line.look !== "control", size: 5, fill: () => colourOf(line, single, data),
          filter: (u, i, show) => show ? null : lone(u.data[i]),
        },
      }, line);
    }
    // A null of a series is a gap up to its neighbours; at rows of other series alone it goes on.
    const joined = uPlot.join(tables, tables.map(() => [1, 2]));
    const positive = joined[0].filter(x => x > 0), unit = positive.length ? positive[0] : 1;
    const ink = css("--muted"), grid = { stroke: css("--grid"), width: 1 };
    const font = `11px ${css("--sans")}`;
    const axis = { stroke: ink, font, ticks: { show: false } };
    const first = joined[0][0], last = joined[0][joined[0].length - 1];
    const whole = last > first ? [first, last] : [first > 0 ? first - 1 : first, last + 1];
    const range = panel.x === "step" && state.zoom ? state.zoom : whole;
    const options = {
      width: Math.max(box.clientWidth, 200), height: named ? Math.max(201, NAME_GAP * lines.length + 45) : 201,
      series, bands, padding: named ? [8, NAME_WIDTH, 0, NAME_WIDTH] : [8, 16, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: false, distr: xlog ? 4 : 1, asinh: unit, range: () => range },
        y: { distr: log ? 3 : 1, dir: panel.down ? -1 : 1, range: (u, low, high) => spread(low, high, log) },
      },
      axes: [
        { ...axis, grid: { show: false }, size: 22, gap: 3, label: (panel.xname || panel.x) + (xlog ? ", log scale" : ""), labelFont: font, labelSize: 15, labelGap: -1, values: (u, splits) => splits.map(tick),
          ...(xlog ? { splits: () => logSplits(range[0], range[1], unit, joined[0]), filter: (u, s) => s } : { space: 60 }),
          ...(WHOLE.includes(panel.x) ? { incrs: INCREMENTS } : {}) },
        { ...axis, grid, show: !named, size: 46, gap: 4, space: 34, values: (u, splits) => splits.map(tick),
          ...(log ? { splits: (u, _, low, high) => powers(low, high), filter: (u, splits) => splits } : {}),
          ...(nothing ? { incrs: INCREMENTS } : {}) },
      ],
      cursor: {
        sync: panel.x === "step" ? { key: "step", setSeries: false } : undefined,
        drag: { x: true, y: false, setScale: false },
        points: { size: 6 },
        dataIdx: (u, index, at) => nearest(u.data[index], u.data[0], at),
      },
      hooks: {
        draw: [u => marker(u, panel, state), ...(named ? [u => nameEnds(u, lines)] : [])],
        setCursor: [u => tip(u, panel, owners, data, single, hooks)],
        setSelect: [u => {
          if (u.select.width < 4) return;
          const zoom = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          if (panel.x === "step") hooks.zoom(zoom.map(v => +v.toPrecision(4)));
          else { range[0] = zoom[0]; range[1] = zoom[1]; u.setScale("x", { min: zoom[0], max: zoom[1] }); }
        }],
      },
    };
    const plot = new uPlot(options, joined, box);
    plot.over.addEventListener("dblclick", () => {
      if (panel.x === "step") hooks.zoom(null);
      else { [range[0], range[1]] = [first, last]; plot.setScale("x", { min: first, max: last }); }
    });
    plot.over.addEventListener("mouseleave", () => { hideTip(); hooks.point(null); });
    // The tooltip by keyboard: arrows go from point to point.
    plot.over.tabIndex = 0;
    plot.over.addEventListener("keydown", event => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by) return;
      event.preventDefault();
      const idx = plot.cursor.idx ?? joined[0].length - (by > 0), at = Math.min(Math.max(idx + by, 0), joined[0].length - 1);
      plot.byKey = true;
      plot.setCursor({ left: plot.valToPos(joined[0][at], "x"), top: plot.over.clientHeight / 2 }, true);
      plot.byKey = false;
    });
    plot.over.addEventListener("blur", () => hideTip());
    box.append(legend(lines, single, data));
    return plot;
  };

  const spread = (low, high, log) => {
    if (low === null || high === null || !finite(low) || !finite(high)) return log ? [0.1, 1] : [0, 1];
    if (log) return [low / 1.15, high > low ? high * 1.15 : high * 2];
    // Whole numbers, not fractions of nothing.
    if (low === 0 && high === 0) return [0, 4];
    if (low > 0 && low < 0.35 * high) low = 0;
    const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return [low === 0 ? 0 : low - room, high + room];
  };

  // Ticks of a logarithmic y: powers of ten, with 2 and 5 between them, or round steps, as few as there is room for.
  const powers = (low, high) => {
    for (const marks of [[1], [1, 3], [1, 2, 5]]) {
      const found = [];
      for (let p = Math.floor(Math.log10(low)); 10 ** p <= high; p++)
        for (const m of marks) if (m * 10 ** p >= low && m * 10 ** p <= high) found.push(+(m * 10 ** p).toPrecision(6));
      if (found.length >= 3) return found.filter((_, i) => i % Math.ceil(found.length / 5) === 0);
    }
    const step = 10 ** Math.floor(Math.log10((high - low) / 2)), found = [];
    for (let at = Math.ceil(low / step) * step; at <= high; at += step) found.push(+at.toPrecision(6));
    return found.filter((_, i) => i % Math.ceil(found.length / 4) === 0);
  };

  const logSplits = (low, high, unit, values) => {
    const found = low <= 0 ? [0] : [], decades = [];
    for (let p = Math.floor(Math.log10(Math.max(unit, low))); 10 ** p <= high; p++) for (const m of [1, 3]) {
      const at = m * 10 ** p;
      if (at >= Math.max(low, unit) && at <= high) decades.push(at);
    }
    const tens = decades.filter(v => Math.abs(Math.log10(v) % 1) < 1e-9);
    const ticks = tens.length > 2 ? tens : decades;
    return ticks.length > 1 ? found.concat(ticks) : found.concat(values.filter(v => v > 0 && v >= low && v <= high).filter((_, i, all) => i % Math.ceil(all.length / 4) === 0));
  };

  const nearest = (values, xs, at) => {
    const there = i => values[i] !== null && values[i] !== undefined;
    for (let away = 0; away < xs.length; away++) {
      if (at - away >= 0 && there(at - away)) return at - away;
      if (at + away < xs.length && there(at + away)) return at + away;
    }
    return at;
  };

  // The chosen step, in every panel over steps.
  const marker = (u, panel, state) => {
    if (panel.x !== "step" || state.step === null) return;
    const x = Math.round(u.valToPos(state.step, "x", true)), { left, width, top, height } = u.bbox;
    if (!(x >= left - 1 && x <= left + width + 1)) return;
    u.ctx.save();
    u.ctx.strokeStyle = css("--ink");
    u.ctx.globalAlpha = 0.45;
    u.ctx.setLineDash([]);
    u.ctx.lineWidth = devicePixelRatio;
    u.ctx.beginPath();
    u.ctx.moveTo(x, top);
    u.ctx.lineTo(x, top + height);
    u.ctx.stroke();
    u.ctx.restore();
  };

  // Blocks that keys name; those of more have a scale of colours.
  const MOST_NAMED = 6;
  const legend = (lines, single, data) => {
    const keys = node("div", "keys"), seen = new Set();
    const blocks = lines.filter(line => line.depth?.[2] === "layer"), scaled = blocks.length > MOST_NAMED;
    const plain = new Set(blocks.map(line => line.plain + line.look));
    const add = (name, look, colour) => {
      if (!name || seen.has(name + look)) return;
      seen.add(name + look);
      const key = node("span"), mark = node("i", look);
      mark.style.setProperty("--c", colour);
      key.append(mark, name.length > 44 ? name.slice(0, 43) + "…" : name);
      keys.append(key);
    };
    // Names of runs stand once, in the bar of controls.
    const groups = new Set(lines.filter(line => line.members).map(line => line.group));
    groups.forEach(group => add(group, "solid", colourOf(lines.find(line => line.group === group), false, data)));
    if (groups.size) add("band: least to largest of the seeds", "band", css("--muted"));
    // Several lines of a group differ in their looks, whose names stand once for all groups.
    const looks = new Map(lines.filter(line => line.members).map(line => [line.look, line.members[0].name]));
    if (looks.size > 1) looks.forEach((name, look) => add(name, look, css("--ink")));
    for (const line of lines) {
      if (line.members || line.faint || seen.size >= 12) continue;
      // Tokens have their names at the ends; a band of one point cannot be seen.
      if (line.text !== undefined) { add(line.plain, line.look, colourOf(line, single, data)); continue; }
      if (line.look === "band" && line.x.length < 2) continue;
      if (scaled && line.depth?.[2] === "layer") {
        if (plain.size > 1) add(line.plain, line.look, css("--ink"));
        continue;
      }
      const alone = lines.every(other => other.name !== line.name || other.run === line.run);
      const own = single || alone || line.look === "control" || line.look === "band";
      add(line.name, line.look, own ? colourOf(line, single, data) : css("--ink"));
    }
    // One name alone tells nothing apart.
    if (seen.size === 1 && !groups.size && lines.length && [...seen][0].startsWith(`${lines[0].probe} probe`)) keys.replaceChildren();
    if (scaled && single) {
      const [, , , first, last] = blocks[0].depth;
      keys.prepend(scale(`block ${first}`, String(last), [0, 1, 2, 3, 4, 5, 6].map(i => depthColour(i / 6, data.depth))));
    }
    return keys;
  };

  // ── what hovering says ───────────────────────────────────────────────────────────────────────────────────────────
  const tipBox = node("div", "tip");
  tipBox.hidden = true;
  const hideTip = () => { tipBox.hidden = true; };
  const showTip = (x, y, rows) => {
    tipBox.replaceChildren(...rows);
    tipBox.hidden = false;
    const { width, height } = tipBox.getBoundingClientRect();
    tipBox.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 6))}px`;
    tipBox.style.top = `${y + height + 18 < innerHeight ? y + 14 : Math.max(4, y - height - 10)}px`;
  };

  const row = (colour, name, value) => {
    const made = node("div", "row"), mark = node("i");
    mark.style.setProperty("--c", colour);
    made.append(mark, node("b", "", value), node("span", "", name));
    return made;
  };

  const MOST = 12;
  const tip = (u, panel, owners, data, single, hooks) => {
    const { left, top, idx } = u.cursor;
    if (left < 0 || idx === null || idx === undefined || !(u.byKey || u.over.matches(":hover"))) return;
    const at = u.data[0][idx], word = panel.x === "layer" ? "block" : panel.x;
    const found = [];
    owners.forEach((line, i) => {
      if (!line) return;
      const k = u.cursor.idxs[i], value = k === null || k === undefined ? null : u.data[i][k];
      if (!finite(value)) return;
      const owner = line.members ? line.group : line.run !== undefined && data.runs.length > 1 && line.run in data.runs ? data.runs[line.run].name : "";
      const x = u.data[0][k];
      const aside = x !== at ? ` (${word} ${x})` : "";
      // What others are judged against comes last.
      const away = Math.abs(u.valToPos(value, "y") - top) + (line.look === "control" || line.look === "band" ? 1e6 : 0);
      const name = [...new Set([owner, line.name])].filter(Boolean).join(", ") || panel.title;
      found.push([away, line, name + aside, value, 1]);
      for (const member of line.members || []) {
        const there = member.y[member.x.indexOf(x)];
        if (finite(there)) found.push([away + 1e4, line, data.runs[member.run].name, there, 0.5]);
      }
    });
    if (!found.length) { hideTip(); return; }
    found.sort((a, b) => a[0] - b[0]);
    // The run that is pointed at has its colour before the rows have theirs.
    hooks.point(found[0][1].run ?? null);
    const coloured = (line, share) => share < 1 ? alpha(colourOf(line, single, data), share) : colourOf(line, single, data);
    const rows = found.slice(0, MOST).map(([, line, name, value, share]) => row(coloured(line, share), name, written(value)));
    if (found.length > MOST) rows.push(node("div", "more", `and ${found.length - MOST} more`));
    const box = u.over.getBoundingClientRect();
    showTip(box.left + left, box.top + top, [node("div", "at", `${word} ${at}`), ...rows]);
  };

  // ── maps and rankings ────────────────────────────────────────────────────────────────────────────────────────────
  const whenOf = (data, run, step) => step === 0 ? (data.runs[run || 0] || { start: "at birth" }).start : `step ${step}`;

  // A map of many cells: one pixel each, stretched.
  const drawMap = (rows, columns, value, said, [low, high], state, data) => {
    const made = node("div", "map"), canvas = node("canvas");
    canvas.width = columns.length;
    canvas.height = rows.length;
    const ink = canvas.getContext("2d");
    rows.forEach((_, i) => columns.forEach((_, j) => {
      const v = value(i, j);
      if (!finite(v)) return;
      const share = Math.min(Math.max((v - low) / (high - low), 0), 1);
      ink.fillStyle = data.colours[Math.round(share * (data.colours.length - 1))];
      ink.fillRect(j, i, 1, 1);
    }));
    made.append(canvas);
    // The first, the last and round numbers between.
    const labelled = names => {
      const last = names.length - 1, every = [1, 2, 5, 10, 20, 50, 100, 200, 500, last + 1].find(size => last / size <= 6);
      return names.map((_, i) => i).filter(i => i === 0 || i === last || names[i] % every === 0 && i >= every / 2 && i <= last - every / 2);
    };
    for (const i of labelled(rows)) {
      const label = node("span", "row", String(rows[i]));
      label.style.top = `${100 * (i + 0.5) / rows.length}%`;
      made.append(label);
    }
    for (const j of labelled(columns)) {
      const label = node("span", "", String(columns[j]));
      label.style.left = `${100 * (j + 0.5) / columns.length}%`;
      made.append(label);
    }
    const row = rows.findIndex(r => String(r) === state.block), column = columns.findIndex(c => String(c) === state.head);
    if (row >= 0) {
      const mark = node("div", "chosen"), [from, wide] = column < 0 ? [0, columns.length] : [column, 1];
      Object.assign(mark.style, { left: `${100 * from / columns.length}%`, width: `${100 * wide / columns.length}%`,
        top: `${100 * row / rows.length}%`, height: `${100 / rows.length}%` });
      made.append(mark);
    }
    canvas.addEventListener("mousemove", event => {
      const { left, top, width, height } = canvas.getBoundingClientRect(), within = (at, n) => Math.min(Math.max(Math.floor(at * n), 0), n - 1);
      canvas.dataset.tip = said(within((event.clientY - top) / height, rows.length), within((event.clientX - left) / width, columns.length));
    });
    return made;
  };

  const drawHeatmap = (panel, box, state, data) => {
    box.replaceChildren();
    const fits = s => (s.run === undefined || s.run === state.focus) && (!s.probe || !state.probe || s.probe === state.probe);
    const found = panel.series.find(fits);
    if (!found) { box.append(node("p", "note", "Nothing was measured for this choice.")); return null; }
    let series = found, when = "";
    if (axisOf(series, "step")) {
      const steps = axisOf(series, "step")[1], i = stepIndex(steps, state.step);
      when = whenOf(data, found.run, steps[i]);
      series = reduce(series, "step", i);
    }
    const rows = axisOf(series, panel.rows)[1], columns = axisOf(series, panel.columns)[1];
    const across = series.axes[0][0] === panel.rows, [low, high] = panel.limits;
    const words = { layer: "block" }, name = n => words[n] || n;
    const who = data.runs.length > 1 && found.run !== undefined ? data.runs[found.run].name : "";
    const note = [who, found.probe ? `${found.probe} probe` : "", when].filter(Boolean).join(", ");
    const axes = `${name(panel.rows)}s down, ${name(panel.columns)}s across`;
    const value = (i, j) => series.v[across ? i * columns.length + j : j * rows.length + i];
    const said = (i, j) => `${name(panel.rows)} ${rows[i]}, ${name(panel.columns)} ${columns[j]}: ${written(value(i, j))}`;
    if (rows.length > 16 || columns.length > 12) {
      box.append(node("p", "when", [note, axes].filter(Boolean).join("; ")), drawMap(rows, columns, value, said, panel.limits, state, data));
      box.append(scale(tick(low), tick(high), data.colours));
      return null;
    }
    const table = node("table", "cells"), head = node("tr");
    head.append(node("th", "", `${name(panel.rows)} \\ ${name(panel.columns)}`), ...columns.map(c => node("th", "", String(c))));
    table.append(head);
    rows.forEach((r, i) => {
      const line = node("tr");
      line.append(node("th", "", String(r)));
      columns.forEach((c, j) => {
        const v = value(i, j);
        const cell = node("td", "", !finite(v) ? "" : Math.abs(v) < 10 ? v.toFixed(2) : written(+v.toPrecision(3)));
        if (finite(v)) {
          const share = Math.min(Math.max((v - low) / (high - low), 0), 1);
          cell.style.background = data.colours[Math.round(share * (data.colours.length - 1))];
          cell.style.color = share < 0.55 ? "#fff" : "#000";
        }
        if (String(r) === state.block && (state.head === "" || String(c) === state.head)) cell.className = "chosen";
        cell.dataset.tip = said(i, j);
        line.append(cell);
      });
      table.append(line);
    });
    box.append(node("p", "when", note), table);
    return null;
  };

  const drawRanking = (panel, box, state, data) => {
    box.replaceChildren();
    const held = panel.lists.filter(list => list.run === state.focus).sort((a, b) => a.step - b.step);
    if (!held.length) { box.append(node("p", "note", "This run has no ranking.")); return null; }
    const list = held[stepIndex(held.map(l => l.step), state.step)];
    const table = node("table"), head = node("tr");
    panel.headings.forEach((heading, i) => head.append(node("th", panel.texts.includes(i) ? "text" : "", heading)));
    table.append(head);
    for (const cells of list.rows) {
      const line = node("tr");
      cells.forEach((text, i) => {
        const cell = node("td", panel.texts.includes(i) ? "text" : "");
        cell.append(panel.texts.includes(i) ? node("span", "token", text) : text);
        line.append(cell);
      });
      table.append(line);
    }
    const who = data.runs.length > 1 ? data.runs[list.run].name + ", " : "";
    box.append(node("p", "when", who + whenOf(data, list.run, list.step)), table);
    return null;
  };

  const DRAW = { curves: drawCurves, heatmap: drawHeatmap, ranking: drawRanking };
  return { DRAW, node, runColour, css, counted, tipBox, showTip, hideTip, axisOf };
})();
