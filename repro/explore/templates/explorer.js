// The explorer: controls, curves, maps of memory. Every number and sentence comes from repro.explore.run. Here they are
// only drawn.
//
// `root` holds the controls: a page's document, or a notebook's shadow root. `python` runs what is asked of it: start()
// and stop() it, ask(key); it says { ready }, { key, text } or { failure } to `heard`, and `isReady` says whether it can
// be asked. It is given up after `seconds`. Returns what ends the explorer.
function explorer(root, about, python) {
  const PATIENCE = 4000;  // ms after which a run that is no longer wanted is not waited for
  const KEPT = 24;  // results in memory
  const NAMES = Object.fromEntries(about.policies.map(([policy, ...names]) => [policy, names]));
  const SLIDERS = Object.values(about.sliders).flat();
  const find = (selector) => root.querySelector(selector), place = root.host || document.body;
  const css = styleOf(root.host || document.documentElement);
  const form = find("form"), cards = find(".cards"), status = find(".status"), curves = find(".curves canvas");
  const scrub = find("[name=step][type=range]"), playing = find("[name=play]");
  const field = (name) => form.elements[name];
  const since = (began) => `${((performance.now() - began) / 1000).toFixed(1)} s`;

  // What is set

  const values = { ...about.defaults, ...about.start.differs };
  const codes = { ...about.examples };
  let { shown } = about.start;
  let moment = 1000;

  function slider(name) {
    const [, label, unit, stops] = SLIDERS.find(([one]) => one === name);
    return { label, unit, stops: [...new Set([...stops, values[name]])].sort((a, b) => a - b) };
  }

  function said(name) {
    if (name === "arrivals" && values.arrivals === 0) return "all are there";
    if (name === "system_prompt" && values.system_prompt === 0) return "none";
    return `${many(values[name])} ${slider(name).unit}`;
  }

  function buildControls() {
    field("preset").append(...about.presets.map(({ name }) => new Option(name)), new Option("your own settings", ""));
    for (const [group, ones] of Object.entries(about.sliders)) {
      const place = form.querySelector(`[data-group=${group}]`);
      for (const [name] of ones) {
        const range = html("input", { type: "range", name, min: 0 });
        place.append(html("label", { className: "slider" }, slider(name).label, html("output"), range));
      }
    }
    for (const [policy, name] of about.policies) {
      const box = html("input", { type: "checkbox", name: "policy", value: policy });
      const label = html("label", {}, box, name.replace("Contiguous, ", "").toLowerCase());
      label.style.setProperty("--c", `var(--${policy})`);
      form.querySelector(".policies").append(label);
    }
    showControls();
  }

  function showControls() {
    for (const [name] of SLIDERS) {
      const { stops } = slider(name), range = field(name);
      range.max = stops.length - 1;
      range.value = stops.indexOf(values[name]);
      range.setAttribute("aria-valuetext", said(name));
      range.previousElementSibling.textContent = said(name);
    }
    for (const name of ["chunks", "rule", "seed", "lengths"]) field(name).value = values[name];
    const unused = values.lengths === "sharegpt" ? Object.keys(about.sharegpt) : [];
    for (const name of Object.keys(about.sharegpt)) field(name).parentElement.hidden = unused.includes(name);
    for (const box of form.querySelectorAll("[name=policy]")) box.checked = shown.includes(box.value);
    field("preset").value = presetNow()?.name || "";
  }

  // The preset that the settings are, if they are not a reader's own. The seed and the rule make no difference.
  function presetNow() {
    const unused = values.lengths === "sharegpt" ? Object.keys(about.sharegpt) : [];
    const free = ["policy", "rule", "code", "seed", ...unused];
    return about.presets.find(({ differs }) => {
      const whole = { ...about.defaults, ...differs };
      return Object.keys(whole).every((name) => free.includes(name) || whole[name] === values[name]);
    });
  }

  // The settings of one run, without what it does not look at: as Settings.relevant of repro.explore.settings.
  function settingsOf(policy) {
    const one = { ...values, policy };
    if (policy === "yours") one.code = codes[one.rule];
    else Object.assign(one, { rule: "reservation", code: "" });
    const paged = policy === "paged" || (policy === "yours" && one.rule === "preemption");
    if (one.lengths === "sharegpt") Object.assign(one, about.sharegpt);
    Object.assign(one, paged ? { chunks: "explainer" } : { block_size: 16, system_prompt: 0 });
    return one;
  }

  const keyOf = (one) => JSON.stringify(Object.fromEntries(Object.entries(one).sort()));

  // Runs: those of the page, and those of the interpreter

  const results = new Map();  // key -> run, or { error }
  let asked = null, watch = 0, startedAt = 0;

  function keep(key, run) {
    results.set(key, run);
    if (results.size > KEPT) results.delete(results.keys().next().value);
  }

  function start() {
    if (python.isReady || startedAt) return;
    startedAt = performance.now();
    say("Python starts …");
    python.start();
  }

  python.heard = ({ ready, key, text, failure }) => {
    if (ready) {
      say(`Python started in ${since(startedAt)}.`);
      ask();
    } else if (failure) {
      fail(failure, key);
    } else {
      if (asked && asked.key === key) {
        clearTimeout(watch);
        say(`Python ran “${NAMES[asked.policy][0]}” in ${since(asked.began)}.`);
        place.dataset.live = Number(place.dataset.live || 0) + 1;
        asked = null;
      }
      keep(key, JSON.parse(text));
      show();
      ask();
    }
  };

  function stop() {
    clearTimeout(watch);
    python.stop();
    asked = null;
    startedAt = 0;
  }

  function fail(message, key = asked?.key) {
    stop();
    if (key) keep(key, { error: message });
    say(`Python stopped: ${message}`);
    show();
  }

  // Have the first run that is shown and not there yet made; the others follow when it is done.
  function ask() {
    const wanted = shown.map(settingsOf).filter((one) => !results.has(keyOf(one)) && !(keyOf(one) in about.runs));
    if (!wanted.length) return;
    const [missing] = wanted, isStale = asked && !wanted.some((one) => keyOf(one) === asked.key);
    if (isStale && performance.now() - asked.began > PATIENCE) stop();  // a rule that does not end, say
    start();
    if (!python.isReady || asked) return;
    const seconds = python.seconds;
    asked = { key: keyOf(missing), policy: missing.policy, began: performance.now() };
    python.ask(asked.key);
    watch = setTimeout(() => fail(`no end after ${seconds} s; change the rule or the settings`), seconds * 1000);
  }

  const say = (text) => { status.textContent = text; };

  // A run at a moment: which request holds which blocks

  class Memory {
    constructor(run) {
      this.run = run;
      const { policy, rule, kv_slots, block_size } = run.settings;
      this.paged = policy === "paged" || (policy === "yours" && rule === "preemption");
      this.size = this.paged ? block_size : 1;
      this.units = Math.floor(kv_slots / this.size);
      this.reset();
    }

    reset() {
      this.step = -1;
      this.place = 0;
      this.tables = new Map();  // request -> { since, stored, blocks } or { since, stored, start, length }
    }

    goTo(step) {
      if (step < this.step) this.reset();
      const { changes } = this.run;
      for (; this.place < changes.length && changes[this.place][0] <= step; this.place++) {
        const [since, kind, request, what, runs] = changes[this.place];
        if (kind === "free") this.tables.delete(request);
        else if (kind === "append") this.tables.get(request).blocks.push(what);
        else if (this.paged) this.tables.set(request, { since, stored: what, blocks: listed(runs) });
        else this.tables.set(request, { since, stored: what, start: runs[0], length: runs[1] });
      }
      this.step = step;
    }

    // Tokens whose K and V a request has in memory.
    stored(request) {
      const table = this.tables.get(request);
      return table.stored + this.step - table.since;
    }

    // Slots that will ever hold a token: the last token of an output is never stored.
    final(request) {
      const [prompt, output] = this.run.lengths[request];
      return prompt + output - 1;
    }

    // Who holds a block (or slot), and as what: { request, index }; the stored system prompt's request is -1.
    holder(unit) {
      const index = this.run.prefix.indexOf(unit);
      if (index >= 0) return { request: -1, index };
      for (const [request, table] of this.tables) {
        const index = this.paged ? table.blocks.indexOf(unit) : unit - table.start;
        if (index >= 0 && (this.paged || index < table.length)) return { request, index };
      }
      return null;
    }

    references(unit) {
      const own = this.run.prefix.includes(unit) ? 1 : 0;
      return own + [...this.tables.values()].filter((table) => table.blocks.includes(unit)).length;
    }
  }

  // Blocks from pairs of a first one and a length, negative where numbers go down.
  function listed(runs) {
    const blocks = [];
    for (let i = 0; i < runs.length; i += 2) {
      const way = Math.sign(runs[i + 1]);
      for (let k = 0; k < Math.abs(runs[i + 1]); k++) blocks.push(runs[i] + way * k);
    }
    return blocks;
  }

  const SHARES = { full: 1, later: 0.5, never: 0.2 };

  // A card: one policy's counters, map and log

  class Card {
    constructor(policy) {
      this.policy = policy;
      this.memory = this.run = this.pointed = null;
      this.canvas = html("canvas", { tabIndex: 0 });
      this.canvas.setAttribute("role", "img");
      this.canvas.setAttribute("aria-label", `memory of ${NAMES[policy][0]}; arrow keys move over its blocks`);
      this.table = html("table");
      this.bar = html("div", { className: "bar" });
      this.error = html("p", { className: "error", hidden: true });
      this.readout = html("p", { className: "readout" });
      this.log = html("ol", { className: "log", tabIndex: 0, ariaLabel: "decisions, the latest first" });
      this.body = html("div", {}, this.canvas, this.readout, this.bar, this.table, this.log);
      const [name, says] = NAMES[policy];
      const head = [html("h2", { textContent: name }), html("p", { className: "soft", textContent: says })];
      this.element = html("article", { className: "card" }, ...head, this.error, this.body);
      this.element.dataset.policy = policy;
      this.element.style.setProperty("--c", `var(--${policy})`);
      this.canvas.addEventListener("pointermove", (event) => this.point(this.cellAt(event)));
      this.canvas.addEventListener("pointerdown", (event) => this.point(this.cellAt(event)));
      // A finger that is lifted leaves, too; what it pointed at stays.
      this.canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.point(null));
      this.canvas.addEventListener("keydown", (event) => this.move(event));
      this.log.addEventListener("click", ({ target }) => target.dataset.step && goTo(Number(target.dataset.step)));
    }

    // The run to show; null while it is being made.
    set(run) {
      this.element.classList.toggle("busy", !run);
      this.element.setAttribute("aria-busy", String(!run));
      if (!run || run === this.run) return;
      this.run = run;
      this.error.hidden = !run.error;
      this.error.textContent = run.error || "";
      this.body.hidden = Boolean(run.error);
      this.memory = run.error ? null : new Memory(run);
    }

    draw() {
      if (!this.memory) return;
      this.memory.goTo(Math.min(moment, this.run.sequences.length - 1));
      this.drawCounters();
      this.drawMap();
      this.drawReadout();
      this.drawLog();
    }

    drawCounters() {
      const { run, memory } = this, { counters, settings } = run, step = memory.step;
      const printed = presetNow()?.printed[this.policy] || {};
      const sample = run.usage[Math.floor(step / run.sample_every)];
      const pieces = Object.fromEntries(run.pieces.map((piece, i) => [piece, sample[i] * 100 / settings.kv_slots]));
      const share = (value) => value?.toFixed(1);
      const lost = (where) => share(where.rounding + where.free);
      const now = run.sequences[step], factor = 1 + Number(field("penalty").value) / 100;
      const lines = { sequences: [many(now), counters.tokens_per_step.toFixed(2), printed.sequences] };
      if (factor > 1 && memory.paged) {
        lines.slower = [(now / factor).toFixed(1), (counters.tokens_per_step / factor).toFixed(2)];
      }
      for (const piece of ["token_states", "reserved", "internal"]) {
        lines[piece] = [share(pieces[piece]), share(counters[piece]), printed[piece]];
      }
      lines.other = [lost(pieces), lost(counters), printed.other];
      if (memory.paged) lines.preemptions = [many(upTo(run.preempted, step)), many(counters.preemptions)];
      else lines.blocked = ["", share(counters.blocked_pct)];
      if (settings.arrivals) lines.waiting = [many(run.waiting[step])];
      const cells = (name, texts) => texts.map((text) => html(name, { textContent: text }));
      const rows = Object.entries(lines).map(([line, [at, mean = "", paper = ""]]) => {
        const [name, title] = about.lines[line];
        return html("tr", { title }, html("th", { textContent: name }), ...cells("td", [at, mean, paper]));
      });
      const heads = cells("th", ["", "this step", "mean", presetNow() ? "printed" : ""]);
      this.table.replaceChildren(html("thead", {}, html("tr", {}, ...heads)), html("tbody", {}, ...rows));
      this.bar.replaceChildren(...run.pieces.map((piece) => {
        const part = html("span", { className: piece, title: `${piece.replace("_", " ")}: ${share(pieces[piece])} %` });
        part.style.width = `${pieces[piece]}%`;
        return part;
      }));
    }

    // Cells: so many slots each that all of them fit; who holds each, as what, and how full a partly filled block is.
    cells() {
      const { memory } = this, width = Math.max(200, this.body.clientWidth), height = Math.min(380, width * 1.2);
      const slots = this.run.settings.kv_slots, block = memory.paged ? memory.size : values.block_size;
      const unit = block * Math.ceil(slots / block / (width * height / 4));
      const number = Math.ceil(memory.units * memory.size / unit);
      let side = Math.max(2, Math.min(22, Math.floor(Math.sqrt(width * height / number))));
      const columns = Math.floor(width / side);
      const owner = new Int32Array(number).fill(-2), fill = new Float32Array(number).fill(1);
      const kind = new Array(number).fill("none");
      const put = (cell, request, what) => { if (cell < number) [owner[cell], kind[cell]] = [request, what]; };
      for (const [request, table] of memory.tables) {
        const stored = memory.stored(request), final = memory.final(request);
        if (memory.paged) {
          table.blocks.forEach((at, index) => {
            const cell = Math.floor(at * memory.size / unit);
            put(cell, request, "full");
            fill[cell] = Math.min(1, (stored - index * memory.size) / memory.size);
          });
        } else {
          const from = Math.max(0, Math.ceil(table.start / unit - 0.5)), to = (table.start + table.length) / unit - 0.5;
          for (let cell = from; cell < to; cell++) {
            const token = (cell + 0.5) * unit - table.start;
            put(cell, request, token < stored ? "full" : token < final ? "later" : "never");
          }
        }
      }
      for (const block of this.run.prefix) put(Math.floor(block * memory.size / unit), -1, "full");
      return { unit, number, side, columns, rows: Math.ceil(number / columns), owner, kind, fill };
    }

    drawMap() {
      const grid = this.grid = this.cells(), { side, columns, rows, number } = grid, pen = this.canvas.getContext("2d");
      const gap = side > 5 ? 1 : 0, ratio = gap ? Math.max(1, Math.round(devicePixelRatio)) : 1;
      const free = numbers(css("--free")), lit = this.pointed === null ? -2 : grid.owner[this.pointed];
      const color = (cell, share = SHARES[grid.kind[cell]]) => {
        if (grid.owner[cell] === -2) return free;
        const dim = lit > -2 && grid.owner[cell] !== lit ? 0.3 : 1;
        return mixed(colorOf(grid.owner[cell]), free, share * dim);
      };
      [this.canvas.style.width, this.canvas.style.height] = [`${columns * side}px`, `${rows * side}px`];
      this.canvas.style.imageRendering = gap ? "auto" : "pixelated";
      if (!gap) {
        [this.canvas.width, this.canvas.height] = [columns, rows];
        const image = pen.createImageData(columns, rows);
        for (let cell = 0; cell < number; cell++) image.data.set([...color(cell), 255], cell * 4);
        pen.putImageData(image, 0, 0);
        return;
      }
      [this.canvas.width, this.canvas.height] = [columns * side * ratio, rows * side * ratio];
      pen.scale(ratio, ratio);
      for (let cell = 0; cell < number; cell++) {
        const [x, y] = [(cell % columns) * side, Math.floor(cell / columns) * side], inner = side - gap;
        const part = Math.round(inner * grid.fill[cell]);
        pen.fillStyle = `rgb(${color(cell, grid.fill[cell] < 1 ? SHARES.later : undefined)})`;
        pen.fillRect(x, y, inner, inner);
        if (grid.fill[cell] < 1 && grid.owner[cell] > -2) {
          pen.fillStyle = `rgb(${color(cell)})`;
          pen.fillRect(x, y + inner - part, inner, part);
        }
      }
      if (this.pointed !== null) {
        const [x, y] = [(this.pointed % columns) * side, Math.floor(this.pointed / columns) * side];
        [pen.strokeStyle, pen.lineWidth] = [css("--ink"), 1.5];
        pen.strokeRect(x - 0.5, y - 0.5, side, side);
      }
    }

    cellAt(event) {
      const box = this.canvas.getBoundingClientRect(), { side, columns, number } = this.grid;
      const row = Math.floor((event.clientY - box.top) / side), column = Math.floor((event.clientX - box.left) / side);
      const cell = row * columns + column;
      return cell >= 0 && cell < number ? cell : null;
    }

    point(cell) {
      if (cell === this.pointed) return;
      this.pointed = cell;
      if (!this.memory) return;
      this.drawMap();
      this.drawReadout();
    }

    move(event) {
      const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.grid.columns, ArrowDown: this.grid.columns }[event.key];
      if (!by) return;
      event.preventDefault();
      this.point(Math.max(0, Math.min(this.grid.number - 1, (this.pointed ?? -by) + by)));
    }

    drawReadout() {
      this.readout.textContent = this.pointed === null ? "Point at a block to see who holds it." : this.told();
    }

    // The block under the pointer: owner, place in the owner's block table, fill, reference count.
    told() {
      const { memory, grid, run } = this, size = memory.size;
      const middle = !memory.paged && grid.kind[this.pointed] !== "none" ? 0.5 : 0;
      const unit = Math.min(memory.units - 1, Math.floor((this.pointed + middle) * grid.unit / size));
      const name = `${memory.paged ? "Block" : "Slot"} ${many(unit)}`, held = memory.holder(unit);
      if (!held) return `${name} is free.`;
      const index = many(held.index), references = memory.paged ? many(memory.references(unit)) : "";
      if (held.request < 0) {
        return `${name} is full. It is block ${index} of the system prompt, reference count ${references}.`;
      }
      const [prompt, output] = run.lengths[held.request], table = memory.tables.get(held.request);
      const stored = memory.stored(held.request), made = many(Math.max(0, stored - prompt));
      const lengths = `prompt ${many(prompt)}, output ${many(output)} tokens; ${made} generated and stored`;
      const who = `Request ${many(held.request)} (${lengths}).`;
      if (memory.paged) {
        const filled = `${Math.max(0, Math.min(size, stored - held.index * size))} of ${count(size, "slot")} filled`;
        const place = `logical block ${index} of ${many(table.blocks.length)}`;
        return `${name} is ${place}: ${filled}, reference count ${references}. ${who}`;
      }
      const waits = held.index < memory.final(held.request) ? "for a token to come" : "and will never be used";
      const state = held.index < stored ? "holds a token" : `is reserved ${waits}`;
      const chunk = `a chunk of ${many(table.length)} from slot ${many(table.start)}`;
      return `${name} is place ${index} in ${chunk}; it ${state}. ${who}`;
    }

    drawLog() {
      const { sentences } = this.run, end = upTo(sentences, this.memory.step);
      this.log.replaceChildren(...sentences.slice(Math.max(0, end - 30), end).reverse().map(([step, text]) => {
        const button = html("button", { type: "button", textContent: many(step), title: "go to this step" });
        button.dataset.step = step;
        const className = step === this.memory.step ? "now" : "";
        return html("li", { className }, button, html("span", { textContent: text }));
      }));
      this.log.scrollTop = 0;
    }
  }

  // All cards together

  const made = new Map();  // policy -> card
  const cardOf = (policy) => made.get(policy) || made.set(policy, new Card(policy)).get(policy);
  const onShow = () => shown.map(cardOf).filter((card) => card.memory && !card.element.classList.contains("busy"));

  function show() {
    let waiting = 0;
    for (const policy of shown) {
      const key = keyOf(settingsOf(policy)), run = results.get(key);
      cardOf(policy).set(run || null);
      waiting += run ? 0 : 1;
      if (!run && key in about.runs) {
        textOf(about.runs[key]).then((text) => { keep(key, JSON.parse(text)); show(); });
      }
    }
    const wanted = shown.map((policy) => cardOf(policy).element);
    const isSame = wanted.length === cards.children.length && wanted.every((one, i) => cards.children[i] === one);
    if (!isSame) cards.replaceChildren(...wanted);
    const mine = shown.includes("yours") ? results.get(keyOf(settingsOf("yours"))) : null;
    const told = form.querySelector(".rule .error");
    told.hidden = !mine?.error;
    told.textContent = mine?.error || "";
    place.dataset.state = waiting ? "running" : "settled";
    draw();
    if (!waiting && !performance.getEntriesByName("first picture").length) performance.mark("first picture");
  }

  function draw() {
    const last = values.warmup_steps + values.steps - 1;
    moment = Math.min(moment, last);
    [scrub.max, scrub.value] = [last, moment];
    find("output[name=step]").textContent = `step ${many(moment)} / ${many(last)}`;
    for (const policy of shown) cardOf(policy).draw();
    drawCurves();
  }

  function goTo(step) {
    moment = step;
    draw();
  }

  // Sequences that run, against steps. Steps that do not count are shaded.
  function drawCurves() {
    const ratio = Math.max(1, devicePixelRatio), pen = curves.getContext("2d");
    const width = curves.clientWidth, height = 150;
    [curves.width, curves.height] = [width * ratio, height * ratio];
    pen.scale(ratio, ratio);
    const cardsThere = onShow(), total = values.warmup_steps + values.steps;
    const most = Math.max(4, ...cardsThere.map((card) => Math.max(...card.run.sequences))) * 1.08;
    const x = (step) => 34 + (width - 44) * step / total, y = (value) => height - 20 - (height - 30) * value / most;
    pen.font = "12px system-ui, sans-serif";
    pen.fillStyle = css("--free");
    pen.fillRect(x(0), 8, x(values.warmup_steps) - x(0), height - 28);
    pen.strokeStyle = css("--line");
    pen.fillStyle = css("--soft");
    const tick = [1, 2, 5, 10, 20, 50, 100].find((one) => most / one <= 5) || 100;
    pen.textAlign = "right";
    for (let value = 0; value < most; value += tick) {
      pen.beginPath();
      pen.moveTo(x(0), y(value) + 0.5);
      pen.lineTo(width - 10, y(value) + 0.5);
      pen.stroke();
      pen.fillText(many(value), 28, y(value) + 4);
    }
    pen.textAlign = "center";
    for (let step = 500; x(step) < width - 26; step += 500) pen.fillText(many(step), x(step), height - 5);
    if (x(values.warmup_steps) - x(0) > 120) pen.fillText("not counted", x(values.warmup_steps / 2), height - 5);
    for (const card of cardsThere) {
      pen.strokeStyle = css(`--${card.policy}`);
      pen.lineWidth = 1.6;
      pen.beginPath();
      card.run.sequences.forEach((value, step) => step ? pen.lineTo(x(step), y(value)) : pen.moveTo(x(step), y(value)));
      pen.stroke();
    }
    pen.fillStyle = css("--ink");
    pen.fillRect(x(moment) - 0.75, 6, 1.5, height - 26);
    const caption = find("figcaption");
    const parts = cardsThere.map((card) => {
      const now = many(card.run.sequences[card.memory.step]);
      const part = html("span", {}, html("b", { textContent: NAMES[card.policy][0] }), ` ${now}`);
      part.style.setProperty("--c", `var(--${card.policy})`);
      return part;
    });
    const traces = cardsThere.map(({ run }) => `${run.trace_hash.slice(0, 12)}, drawn by ${run.drawn_by}`);
    const lengths = `lengths ${[...new Set(traces)].join("; ")}`;
    caption.replaceChildren("Sequences that run:", ...parts, html("span", { textContent: lengths }));
  }

  // What a reader does

  let later = 0;
  function changed() {
    showControls();
    start();
    clearTimeout(later);
    place.dataset.state = "running";
    later = setTimeout(() => { show(); ask(); }, 200);
  }

  function tryRule() {
    if (!shown.includes("yours")) shown.push("yours");
    changed();
  }

  form.addEventListener("input", (event) => {
    const { name, value } = event.target;
    if (name === "code") { codes[values.rule] = value; return; }
    if (name === "penalty") { draw(); return; }
    if (name === "preset") {
      const chosen = about.presets.find((one) => one.name === value);
      if (chosen) Object.assign(values, about.defaults, chosen.differs, { rule: values.rule, seed: values.seed });
    } else if (name === "policy") {
      const boxes = [...form.querySelectorAll("[name=policy]")].filter((box) => box.checked);
      shown = boxes.map((box) => box.value);
    } else if (name === "rule") {
      values.rule = value;
      field("code").value = codes[value];
      if (!shown.includes("yours")) return;
    } else if (event.target.type === "range") {
      values[name] = slider(name).stops[Number(value)];
    } else if (name === "seed") {
      if (!/^\d{1,15}$/.test(value)) return;
      values.seed = Number(value);
    } else {
      values[name] = value;
    }
    changed();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.elements.try.addEventListener("click", tryRule);
  field("code").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) tryRule();
  });
  scrub.addEventListener("input", () => goTo(Number(scrub.value)));
  curves.addEventListener("pointerdown", (event) => {
    const at = (event.clientX - curves.getBoundingClientRect().left - 34) / (curves.clientWidth - 44);
    goTo(Math.round(Math.max(0, Math.min(1, at)) * (values.warmup_steps + values.steps - 1)));
  });
  let timer = 0;
  playing.addEventListener("click", () => {
    clearInterval(timer);
    timer = timer ? 0 : setInterval(() => goTo((moment + 2) % (values.warmup_steps + values.steps)), 60);
    [playing.textContent, playing.ariaLabel] = timer ? ["❚❚", "pause"] : ["▶", "play"];
  });
  let width = cards.clientWidth;
  const sizes = new ResizeObserver(() => { if (cards.clientWidth !== width) { width = cards.clientWidth; draw(); } });
  sizes.observe(cards);
  const endTheme = onTheme(draw);

  buildControls();
  field("code").value = codes[values.rule];
  say(about.start.said);
  show();
  ask();
  return () => {
    clearInterval(timer);
    clearTimeout(watch);
    sizes.disconnect();
    endTheme();
  };
}
