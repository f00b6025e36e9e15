// What one can jump to: name, colour, the kinds of happenings; without them it is where a stall begins.
const JUMPS = [
  ["parting", "--bad"],
  ["preemption", "--max", ["recompute", "swap"]],
  ["swap", "--oracle", ["swap", "resume"]],
  ["copy", "--yours", ["copy"]],
  ["stall", "--pow2"],
];

// Of a run: the frames that are marked (`marks`), and those to jump to (`at`), of each kind that it has.
function jumpsOf(run, parting) {
  return JUMPS.map(([name, color, kinds]) => {
    const ours = run.happenings.filter(([, kind]) => kinds?.includes(kind)).map(([frame]) => frame);
    const marks = name === "parting" ? [parting].filter((frame) => frame !== null) : kinds ? ours : run.stalled;
    const at = name === "stall" ? marks.filter((frame, index) => frame !== marks[index - 1] + 1) : [...new Set(marks)];
    return { name, color, marks, at };
  }).filter(({ at }) => at.length);
}

// A memory map in the elements named `name`. All that it shows comes from repro.history.memory_map; here block tables
// are made again from changes. `view` is what all maps of a page have in common: where one looks (see player.js).
function memoryMap(name, run, view) {
  const css = styleOf(document.documentElement);
  const { num_blocks: blocks, block_size: size } = run, frames = run.start_s.length;
  const FREE = 0, CACHED = 1, PREFIX = 2;  // what a cell is; from 3 on by twos a request, and one more: without a token
  const MARGIN = { left: 78, right: 10, bottom: 38, row: 14 };
  const find = (selector) => document.querySelector(`[data-map="${name}"] ${selector}`);
  const history = find(".history canvas"), pool = find(".pool canvas");
  const readout = find(".readout"), log = find(".log"), bills = find(".bills table");
  const hundredths = new Intl.NumberFormat("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
  const isTimed = run.unit === "s", slotTime = isTimed ? "slot-seconds" : "slot-iterations";
  const seconds = (frame) => `${hundredths.format(run.start_s[frame])} s`;
  const share = (value, whole) => `${(100 * value / whole).toFixed(1)} %`;

  const ids = Object.keys(run.requests).map(Number), place = new Map(ids.map((id, index) => [id, index]));
  const requestOf = (table) => run.sequences[table >> 1][0];
  const cellOf = (request) => 3 + 2 * place.get(request);
  const holderOf = (cell) => cell < 3 ? null : ids[(cell - 3) >> 1];
  const prefix = new Map(run.prefix.map((block, index) => [block, index]));
  const lengths = new Map(ids.map((id) => [id, []]));
  for (const [since, request, tokens, grows] of run.lengths) lengths.get(request).push([since, tokens, grows]);

  // Tokens that each sequence of a request has in memory.
  function stored(request, frame) {
    const all = lengths.get(request), at = upTo(all, frame);
    if (!at) return 0;
    const [since, tokens, grows] = all[at - 1];
    return tokens + grows * (frame - since);
  }

  function change(tables, [, table, kept, ...more]) {
    const now = [...(tables.get(table) || []).slice(0, kept), ...more];
    if (now.length) tables.set(table, now);
    else tables.delete(table);
  }

  // Every cell of the map, frame by frame; snapshots of all tables to begin from. What the changes give must be what
  // was read from the memory manager.
  const cells = new Uint32Array(frames * blocks), snapshots = [];

  function build() {
    const [[, first], ...later] = run.keyframes, tables = new Map(), column = new Uint32Array(blocks);
    const held = Array.from({ length: blocks }, () => []), cached = new Set(), filled = new Map();
    for (const block of prefix.keys()) column[block] = PREFIX;
    // Every block of paged memory holds a token; a contiguous chunk has its blocks before their tokens come.
    const paint = (block) => {
      if (prefix.has(block)) return;
      if (held[block].length) column[block] = cellOf(requestOf(held[block][0])) + (run.is_paged ? 0 : 1);
      else column[block] = cached.has(block) ? CACHED : FREE;
    };
    const apply = (delta) => {
      const [, table, kept] = delta, before = tables.get(table) || [];
      change(tables, delta);
      if (table % 2) return;
      for (const block of before.slice(kept)) {
        held[block].splice(held[block].indexOf(table), 1);
        paint(block);
      }
      for (const block of (tables.get(table) || []).slice(kept)) {
        held[block].push(table);
        paint(block);
      }
      filled.set(table, Math.min(kept, filled.get(table) || 0));
    };
    for (const [table, list] of first) apply([0, table, 0, ...list]);
    let [delta, toggle, key] = [0, 0, 0];
    for (let frame = 0; frame < frames; frame++) {
      for (; delta < run.deltas.length && run.deltas[delta][0] === frame; delta++) apply(run.deltas[delta]);
      for (; toggle < run.cached.length && run.cached[toggle][0] === frame; toggle++) {
        const block = run.cached[toggle][1];
        if (!cached.delete(block)) cached.add(block);
        paint(block);
      }
      for (const [table, list] of run.is_paged ? [] : tables) {
        const request = requestOf(table), full = Math.min(list.length, Math.ceil(stored(request, frame) / size));
        for (let index = filled.get(table); index < full; index++) column[list[index]] = cellOf(request);
        filled.set(table, full);
      }
      if (later[key]?.[0] === frame) {
        const same = ([table, list]) => String(tables.get(table)) === String(list);
        if (later[key][1].length !== tables.size || !later[key][1].every(same)) {
          throw new Error(`the changes do not give the block tables of iteration ${run.first + frame}`);
        }
        key += 1;
      }
      if (frame % 64 === 0) snapshots.push([delta, new Map(tables)]);
      cells.set(column, frame * blocks);
    }
  }

  const remembered = new Map();  // frame -> its tables, the latest ones asked for

  function tablesAt(frame) {
    if (remembered.has(frame)) return remembered.get(frame);
    const [delta, before] = snapshots[frame >> 6], tables = new Map(before);
    for (let at = delta; at < run.deltas.length && run.deltas[at][0] <= frame; at++) change(tables, run.deltas[at]);
    remembered.set(frame, tables);
    if (remembered.size > 4) remembered.delete(remembered.keys().next().value);
    return tables;
  }

  // What is seen

  const theme = new Map();  // the names of colours that have been asked for
  const hue = (name) => theme.get(name) ?? theme.set(name, css(name)).get(name);

  let moment = 0, pointed = null, shownFrames = [0, frames], colors = null, bitmapOf = "";
  const bitmap = document.createElement("canvas");

  function palette() {
    const free = numbers(hue("--free")), link = numbers(hue("--link"));
    const pack = ([red, green, blue]) => (255 << 24 | blue << 16 | green << 8 | red) >>> 0;
    const colors = [pack(free), pack(mixed(link, free, 0.22)), pack(colorOf(-1))];
    for (const id of ids) {
      const color = view.followed === null || view.followed === id ? colorOf(id) : mixed(numbers(hue("--soft")), free, 0.35);
      colors.push(pack(color), pack(mixed(color, free, 0.3)));
    }
    return Uint32Array.from(colors);
  }

  // The blocks of a window of iterations, one pixel for each of a device's.
  function drawBitmap(width, height) {
    const key = [width, height, ...shownFrames, view.followed, isDark()].join();
    if (key === bitmapOf) return;
    bitmapOf = key;
    colors = palette();
    [bitmap.width, bitmap.height] = [width, height];
    const pen = bitmap.getContext("2d"), image = pen.createImageData(width, height);
    const pixels = new Uint32Array(image.data.buffer), [from, to] = shownFrames;
    const frameAt = (x) => Math.floor(from + (x + 0.5) * (to - from) / width);
    const starts = Int32Array.from({ length: width }, (_, x) => blocks * frameAt(x));
    const end = starts.findIndex((start) => start >= cells.length), wide = end < 0 ? width : end;
    for (let y = 0; y < height; y++) {
      const block = Math.floor((height - y - 0.5) * blocks / height);
      for (let x = 0, at = y * width; x < wide; x++, at++) pixels[at] = colors[cells[starts[x] + block]];
    }
    pen.putImageData(image, 0, 0);
  }

  const jumps = jumpsOf(run, view.parting), rows = view.rows, marked = new Map(jumps.map((one) => [one.name, one]));

  // Where things are on the history's canvas, in CSS pixels; its whole size.
  let area = null;

  function lay() {
    const top = 6 + MARGIN.row * rows.length, { left, right, bottom } = MARGIN;
    const [width, height] = [history.clientWidth, history.clientHeight];
    area = { left, top, width: width - left - right, height: height - top - bottom, whole: [width, height] };
    [history.width, history.height] = area.whole.map((value) => Math.round(value * Math.max(1, devicePixelRatio)));
    theme.clear();
  }

  const TICKS = [1, 2, 5].flatMap((one) => [...Array(8)].map((_, power) => one * 10 ** power)).sort((a, b) => a - b);
  const tickOf = (length, most) => TICKS.find((one) => length / one <= most) || length;

  function drawHistory() {
    const ratio = Math.max(1, devicePixelRatio), pen = history.getContext("2d");
    const [from, to] = shownFrames = view.shown();
    drawBitmap(Math.round(area.width * ratio), Math.round(area.height * ratio));
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, history.width, history.height);
    pen.drawImage(bitmap, Math.round(area.left * ratio), Math.round(area.top * ratio));
    pen.scale(ratio, ratio);
    const x = (frame) => area.left + area.width * (frame - from) / (to - from);
    const y = (block) => area.top + area.height * (1 - block / blocks);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    rows.forEach((name, row) => {
      const { color, marks } = marked.get(name) ?? { marks: [] }, middle = MARGIN.row * (row + 0.5);
      pen.fillStyle = hue("--soft");
      pen.fillText(name, area.left - 8, middle);
      if (color) pen.fillStyle = hue(color);
      const wide = name === "parting" ? 7 : Math.max(1.2, area.width / (to - from));
      for (let index = upTo(marks, from - 1); index < marks.length && marks[index] < to; index++) {
        pen.fillRect(x(marks[index]) - (name === "parting" ? 3.5 : 0), middle - 4, wide, 8);
      }
    });
    pen.fillStyle = pen.strokeStyle = hue("--soft");
    const every = tickOf(blocks, area.height / 60);
    for (let block = 0; block < blocks; block += every) {
      pen.fillText(many(block), area.left - 8, Math.min(y(block), area.top + area.height - 6));
    }
    pen.save();
    pen.translate(12, area.top + area.height / 2);
    pen.rotate(-Math.PI / 2);
    pen.textAlign = "center";
    pen.fillText("block", 0, 0);
    pen.restore();
    pen.textAlign = "center";
    pen.textBaseline = "top";
    const step = tickOf(to - from, area.width / 110);
    for (let frame = Math.ceil((run.first + from) / step) * step - run.first; frame < to; frame += step) {
      if (x(frame) > area.left + area.width - 30 || x(frame) < area.left) continue;
      pen.fillRect(x(frame), area.top + area.height, 1, 4);
      pen.fillText(many(run.first + frame), x(frame), area.top + area.height + 6);
      if (isTimed && frame < frames) pen.fillText(seconds(frame), x(frame), area.top + area.height + 21);
    }
    pen.textAlign = "left";
    pen.fillText("iteration", 0, area.top + area.height + 6);
    if (isTimed) pen.fillText("time", 0, area.top + area.height + 21);
    pen.fillStyle = hue("--ink");
    pen.fillRect(x(view.moment + 0.5) - 0.75, 0, 1.5, area.top + area.height + 4);
    if (view.parting !== null && view.parting >= from && view.parting < to) {
      pen.fillStyle = hue("--paper");
      pen.fillRect(x(view.parting) - 1.5, area.top, 3, area.height);
      pen.fillStyle = hue("--bad");
      for (let at = area.top; at < area.top + area.height; at += 8) pen.fillRect(x(view.parting) - 0.75, at, 1.5, 5);
    }
    if (pointed) {
      pen.strokeStyle = hue("--ink");
      const [wide, high] = [area.width / (to - from), area.height / blocks].map((value) => Math.max(3, value + 3));
      pen.strokeRect(x(pointed.frame) - 1.5, y(pointed.block + 1) - 1.5, wide, high);
    }
  }

  // The pool at the cursor: a cell for each block, as full as it is.
  const grid = { columns: 1, side: 1 };

  function drawPool(tables) {
    const width = 282, most = Math.min(430, area.whole[1] - 30);
    let side = Math.max(1, Math.min(22, Math.floor(Math.sqrt(width * most / blocks))));
    while (side > 1 && Math.ceil(blocks / Math.floor(width / side)) * side > most) side -= 1;
    Object.assign(grid, { side, columns: Math.floor(width / side) });
    const lines = Math.ceil(blocks / grid.columns), fill = new Float32Array(blocks).fill(1);
    for (const [table, list] of tables) {
      if (table % 2) continue;
      const tokens = stored(requestOf(table), moment), index = Math.floor(tokens / size);
      if (index < list.length && !prefix.has(list[index])) fill[list[index]] = (tokens % size) / size;
    }
    [pool.width, pool.height] = [grid.columns * side, lines * side];
    const pen = pool.getContext("2d"), image = pen.createImageData(pool.width, pool.height);
    const pixels = new Uint32Array(image.data.buffer), inner = side > 4 ? side - 1 : side;
    for (let block = 0; block < blocks; block++) {
      const cell = cells[moment * blocks + block], left = (block % grid.columns) * side;
      const top = Math.floor(block / grid.columns) * side, empty = cell < 3 ? cell : cell + (cell % 2);
      const light = Math.round(inner * (1 - fill[block]));
      for (let y = 0; y < inner; y++) {
        const color = colors[y < light ? empty : cell];
        pixels.fill(color, (top + y) * pool.width + left, (top + y) * pool.width + left + inner);
      }
    }
    pen.putImageData(image, 0, 0);
    if (pointed && pointed.frame === moment) {
      pen.strokeStyle = hue("--ink");
      const [column, line] = [pointed.block % grid.columns, Math.floor(pointed.block / grid.columns)];
      pen.strokeRect(column * side + 0.5, line * side + 0.5, side - 1, side - 1);
    }
  }

  // Words

  const about = (request) => {
    const [prompt, output, n] = run.requests[request], each = n > 1 ? `, ${many(n)} sequences` : "";
    return `request ${many(request)} (prompt ${many(prompt)}, output at most ${many(output)} tokens${each})`;
  };

  // Who holds a block in an iteration, as what.
  function told({ frame, block }) {
    const when = `Iteration ${many(run.first + frame)}${isTimed ? `, ${seconds(frame)}` : ""}: block ${many(block)}`;
    if (prefix.has(block)) return `${when} is block ${many(prefix.get(block))} of a declared prefix, full.`;
    const holders = [...tablesAt(frame)].filter(([table, list]) => table % 2 === 0 && list.includes(block));
    if (!holders.length) {
      return `${when} is free${cells[frame * blocks + block] === CACHED ? ", and the prefix cache finds it" : ""}.`;
    }
    const [[table, list]] = holders, request = requestOf(table), index = list.indexOf(block);
    const filled = Math.max(0, Math.min(size, stored(request, frame) - index * size));
    const others = [...new Set(holders.map(([one]) => requestOf(one)))].filter((one) => one !== request);
    const also = others.length ? ` Also held by request ${others.slice(0, 5).map(many).join(", ")}.` : "";
    return `${when} is logical block ${many(index)} of ${many(list.length)} of ${about(request)}: ` +
      `${filled} of ${count(size, "slot")} filled, reference count ${many(holders.length)}.${also}`;
  }

  function drawState(tables) {
    const held = new Set(prefix.keys()), onGpu = new Set(), onCpu = new Map();
    let tokens = prefix.size * size;
    for (const [table, list] of tables) {
      const request = requestOf(table);
      if (table % 2) { onCpu.set(request, new Set([...(onCpu.get(request) || []), ...list])); continue; }
      if (list.every((block) => prefix.has(block))) continue;
      onGpu.add(request);
      const there = stored(request, moment);
      list.forEach((block, index) => {
        if (held.has(block)) return;
        held.add(block);
        tokens += Math.max(0, Math.min(size, there - index * size));
      });
    }
    for (const request of onCpu.keys()) onGpu.delete(request);
    const moved = [...onCpu.values()].reduce((sum, list) => sum + list.size, 0);
    const names = [...onCpu.keys()].slice(0, 4).map(many).join(", ") + (onCpu.size > 4 ? ", …" : "");
    const cached = cells.subarray(moment * blocks, (moment + 1) * blocks).filter((cell) => cell === CACHED).length;
    const rows = [
      ["running", count(onGpu.size, "request")],
      ["waiting", count(run.counts[moment][1], "request")],
      ["swapped", count(onCpu.size, "request") + (names && ` (${names})`)],
      ["blocks held", `${many(held.size)} of ${many(blocks)}, ${share(held.size, blocks)}`],
      ["slots with a token", `${many(tokens)} of ${many(blocks * size)}, ${share(tokens, blocks * size)}`],
    ];
    if (run.cached.length) rows.push(["free, in the cache", count(cached, "block")]);
    if (moved) rows.push(["in CPU memory", count(moved, "block")]);
    if (isTimed) rows.push(["lasted", `${(1000 * (run.end_s[moment] - run.start_s[moment])).toFixed(1)} ms`]);
    if (view.followed !== null) {
      const followed = view.followed, own = [...tables].filter(([table]) => requestOf(table) === followed);
      const number = new Set(own.flatMap(([table, list]) => list.map((block) => `${table % 2} ${block}`))).size;
      const isOut = own.some(([table]) => table % 2), tokens = count(stored(followed, moment), "token");
      const where = isOut ? ", in CPU memory" : `, ${tokens}`;
      rows.push([`request ${many(followed)}`, number ? count(number, "block") + where : "holds nothing"]);
    }
    find(".state").replaceChildren(...rows.map(([name, text]) => {
      return html("tr", {}, html("th", { textContent: name }), html("td", { textContent: text }));
    }));
  }

  let listedOf = null, listed = run.happenings;

  function drawLog() {
    if (listedOf !== view.followed) {
      listedOf = view.followed;
      listed = run.happenings.filter(([, , request]) => listedOf === null || request === listedOf);
    }
    const end = upTo(listed, moment);
    log.replaceChildren(...listed.slice(Math.max(0, end - 14), end).reverse().map(([frame, , , text]) => {
      const name = many(run.first + frame);
      const button = html("button", { type: "button", textContent: name, title: "go to this iteration" });
      button.dataset.frame = frame;
      return html("li", { className: frame === moment ? "now" : "" }, button, html("span", { textContent: text }));
    }));
  }

  function drawRent() {
    const sum = (rows, name) => rows.reduce((total, row) => total + row[name], 0);
    const requests = run.rent.filter((row) => row.billed_to === "request"), total = sum(run.rent, "slot_s");
    const other = (name) => run.rent.find((row) => row.billed_to === name).slot_s;
    const parts = [
      ["tokens", "requests, slots with a token", sum(requests, "token_slot_s")],
      ["reserved", "requests, empty slots", sum(requests, "empty_slot_s")],
      ["prefix", "declared prefixes", other("prefix")],
      ["cache", "free, in the prefix cache", other("cache")],
      ["nobody", "nobody", other("nobody")],
    ].filter(([, , value]) => value > 0);
    find(".rent .bar").replaceChildren(...parts.map(([className, title, value]) => {
      const part = html("span", { className, title });
      part.style.width = `${100 * value / total}%`;
      return part;
    }));
    const said = parts.map(([, title, value]) => `${title} ${share(value, total)}`).join("; ");
    find(".rent p").textContent = `Of ${many(total)} ${slotTime} (slots × time of all iterations): ${said}.`;
    const line = (name, texts) => texts.map((text) => html(name, { textContent: text }));
    const rows = [...requests].sort((a, b) => b.slot_s - a.slot_s).slice(0, 200).map((row) => {
      const texts = [many(row.slot_s), share(row.slot_s, total), share(row.token_slot_s, row.slot_s || 1)];
      const made = html("tr", {}, html("th", { textContent: `request ${many(row.request_id)}` }), ...line("td", texts));
      made.dataset.request = row.request_id;
      return made;
    });
    const who = requests.length > 200 ? "the 200 dearest" : "";
    const heads = line("th", [who, slotTime, "of all", "with a token"]);
    bills.replaceChildren(html("thead", {}, html("tr", {}, ...heads)), html("tbody", {}, ...rows));
  }

  function drawKey() {
    const free = numbers(css("--free")), [one, other] = [colorOf(1), colorOf(2)];
    const kinds = [[one, "one colour a request"]];
    if (!run.is_paged) kinds.push([mixed(one, free, 0.3), "reserved, without a token"]);
    if (run.is_paged) kinds.push([mixed(other, free, 0.3), "empty slots of a block (right)"]);
    if (prefix.size) kinds.push([colorOf(-1), "declared prefix"]);
    if (run.cached.length) kinds.push([mixed(numbers(css("--link")), free, 0.22), "free, in the prefix cache"]);
    kinds.push([free, "free"]);
    find(".key")?.replaceChildren(...kinds.map(([color, text]) => {
      const mark = html("i");
      mark.style.setProperty("--c", `rgb(${color})`);
      return html("span", {}, mark, text);
    }));
  }

  function draw() {
    moment = Math.min(view.moment, frames - 1);
    const tables = tablesAt(moment);
    drawHistory();
    drawPool(tables);
    drawState(tables);
    drawLog();
    find(".pool figcaption").textContent = moment === view.moment ? "The pool at this iteration" : "The pool at its end";
    if (pointed) readout.textContent = told(pointed);
  }

  // A request is followed, or nobody is.
  function mark() {
    for (const row of bills.querySelectorAll("tbody tr")) {
      row.classList.toggle("now", Number(row.dataset.request) === view.followed);
    }
  }

  // What a reader does

  function placeInHistory(event) {
    const box = history.getBoundingClientRect(), [from, to] = shownFrames;
    const x = (event.clientX - box.left - area.left) / area.width;
    const y = (event.clientY - box.top - area.top) / area.height;
    const frame = Math.floor(from + x * (to - from)), block = Math.floor((1 - y) * blocks);
    const inside = x >= 0 && x < 1 && block >= 0 && block < blocks && frame < frames;
    return { frame: Math.max(from, Math.min(to - 1, frame)), block, inside };
  }

  function placeInPool(event) {
    const box = pool.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / grid.side);
    const line = Math.floor((event.clientY - box.top) / grid.side);
    const block = line * grid.columns + column;
    return { frame: moment, block, inside: column >= 0 && column < grid.columns && block >= 0 && block < blocks };
  }

  function point(at) {
    pointed = at.inside ? at : null;
    if (!pointed) readout.textContent = "Point at a block to see who holds it.";
    draw();
  }

  const pick = (at) => view.follow(at.inside ? holderOf(cells[at.frame * blocks + at.block]) : null);
  let pressed = null;
  history.addEventListener("pointerdown", (event) => {
    pressed = event.clientX;
    history.setPointerCapture(event.pointerId);
  });
  history.addEventListener("pointermove", (event) => {
    const at = placeInHistory(event);
    if (pressed !== null && Math.abs(event.clientX - pressed) > 3) view.goTo(at.frame);
    else point(at);
  });
  history.addEventListener("pointerup", (event) => {
    const at = placeInHistory(event), moved = pressed === null || Math.abs(event.clientX - pressed) > 3;
    pressed = null;
    if (moved) return;
    view.goTo(at.frame);
    if (at.inside) pick(at);
  });
  history.addEventListener("pointerleave", () => point({ inside: false }));
  pool.addEventListener("pointermove", (event) => point(placeInPool(event)));
  pool.addEventListener("pointerleave", () => point({ inside: false }));
  pool.addEventListener("click", (event) => pick(placeInPool(event)));
  bills.addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-request]");
    if (row) view.follow(Number(row.dataset.request) === view.followed ? null : Number(row.dataset.request));
  });
  log.addEventListener("click", ({ target }) => target.dataset.frame && view.goTo(Number(target.dataset.frame)));

  find(".jumps").append(...jumps.map(({ name, color, at }) => {
    const [back, forth] = [["‹", "before"], ["›", "next"]].map(([textContent, where]) => {
      return html("button", { type: "button", textContent, ariaLabel: `${name} ${where}`, name: `${where}-${name}` });
    });
    back.addEventListener("click", () => { const found = upTo(at, view.moment - 1); if (found) view.goTo(at[found - 1]); });
    forth.addEventListener("click", () => { const found = upTo(at, view.moment); if (found < at.length) view.goTo(at[found]); });
    const made = html("span", { className: "jump" }, html("i"), `${name} (${many(at.length)})`, back, forth);
    made.style.setProperty("--c", `var(${color})`);
    return made;
  }));

  build();
  drawRent();
  return { lay, drawKey, draw, mark, about, when: () => isTimed ? `, ${seconds(moment)}` : "" };
}
