// Looking closer: a chart of a figure's rows. A point under the mouse shows its row; a name in the legend hides its series.
(() => {
  const LEFT = 68, RIGHT = 14, TOP = 12, SLANT = 32;  // pixels; degrees of names that do not fit side by side
  const DASHES = { modelled: "6 3", replayed: "7 2 1.5 2" };  // as in the figures: solid is what a clock measured

  function element(name, attributes = {}, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function html(name, properties = {}, ...children) {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  }

  const words = (name) => name.replaceAll("_", " ");
  const written = (value) => typeof value === "number" ? value.toLocaleString("en", { maximumSignificantDigits: 4 }) : value;

  // The rows as objects. A column of texts comes as its distinct texts and an index of them a row.
  function rowsOf(data) {
    const columns = Object.entries(data.columns).map(([name, c]) => [name, c.texts ? c.at.map((i) => c.texts[i]) : c]);
    const count = Math.max(0, ...columns.map(([, values]) => values.length));
    return Array.from({ length: count }, (_, i) => Object.fromEntries(columns.map(([name, values]) => [name, values[i]])));
  }

  // An axis: where a value lies between `from` and `to`, and where it has ticks. Texts stand side by side, without lines.
  function axis(values, logarithmic, from, to) {
    if (values.some((value) => typeof value !== "number")) {
      const texts = [...new Set(values)];
      const step = (to - from) / texts.length;
      return { at: (value) => from + step * (texts.indexOf(value) + 0.5), ticks: texts, texts: true };
    }
    let [low, high] = [Math.min(...values), Math.max(...values)];
    if (logarithmic && low > 0) {
      const ticks = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
        for (const digit of high / low < 1000 ? [1, 2, 5] : [1]) ticks.push(digit * 10 ** power);
      }
      [low, high] = [low / 1.1, high * 1.1];
      const at = (value) => from + (to - from) * Math.log(value / low) / Math.log(high / low);
      return { at, ticks: ticks.filter((tick) => tick >= low && tick <= high) };
    }
    [low, high] = [Math.min(0, low), high > low || high > 0 ? high * 1.04 : 1];
    const size = 10 ** Math.floor(Math.log10((high - low) / 4)), rough = (high - low) / 4 / size;
    const step = size * (rough > 5 ? 10 : rough > 2 ? 5 : rough > 1 ? 2 : 1);
    const ticks = [];
    for (let tick = Math.ceil(low / step); tick * step <= high; tick++) ticks.push(Number((tick * step).toPrecision(12)));
    return { at: (value) => from + (to - from) * (value - low) / (high - low), ticks };
  }

  // The means of y over the rows that have the same x (the seeds, mostly), in the order of x.
  function line(rows, data, x, y) {
    const groups = Map.groupBy(rows, (row) => row[data.x]);
    const means = [...groups].map(([value, group]) => [x.at(value), group.reduce((sum, row) => sum + row[data.y], 0) / group.length]);
    return means.sort((a, b) => a[0] - b[0]).map(([px, mean]) => `${px.toFixed(1)},${y.at(mean).toFixed(1)}`).join(" ");
  }

  function draw(place, data) {
    const all = rowsOf(data), hidden = new Set();
    const choices = data.panels.map((panel) => {
      const options = [...new Set(all.map((row) => row[panel]))].map((value) => new Option(value));
      return html("select", { name: panel, ariaLabel: words(panel) }, ...options);
    });
    const asked = choices.filter((choice) => choice.length > 1).flatMap((choice) => [`${words(choice.name)} `, choice, " "]);
    const width = Math.max(320, place.clientWidth), height = Math.max(280, Math.min(420, width / 2));
    const legend = html("span", { className: "legend" }), drawing = html("div"), told = html("dl", { className: "row" });
    place.replaceChildren(html("p", {}, ...asked, legend), drawing, told);

    function redraw() {
      const rows = all.filter((row) => choices.every((choice) => String(row[choice.name]) === choice.value));
      const names = [...new Set(rows.map((row) => row[data.series]))];
      const seen = rows.filter((row) => !hidden.has(row[data.series]) && (!data.log.includes("y") || row[data.y] > 0));
      const shown = seen.filter((row) => row[data.x] !== null && row[data.y] !== null);
      const x = axis(shown.map((row) => row[data.x]), data.log.includes("x"), LEFT, width - RIGHT);
      const longest = Math.max(0, ...x.ticks.map((tick) => String(tick).length)) * 7, slanted = x.texts && longest * x.ticks.length > width - LEFT;
      const low = height - (slanted ? 36 + longest * Math.sin(SLANT * Math.PI / 180) : 46);
      const y = axis(shown.map((row) => row[data.y]), data.log.includes("y"), low, TOP);
      const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${words(data.y)} against ${words(data.x)}` });
      for (const tick of y.ticks) {
        svg.append(element("line", { x1: LEFT, x2: width - RIGHT, y1: y.at(tick), y2: y.at(tick), class: "grid" }));
        svg.append(element("text", { x: LEFT - 6, y: y.at(tick) + 4, "text-anchor": "end" }, written(tick)));
      }
      for (const tick of x.ticks) {
        const turn = slanted ? `rotate(${-SLANT})` : "", anchor = slanted ? "end" : "middle";
        svg.append(element("text", { transform: `translate(${x.at(tick)} ${low + 18}) ${turn}`, "text-anchor": anchor }, written(tick)));
      }
      svg.append(element("text", { x: (LEFT + width) / 2, y: height - 6, "text-anchor": "middle", class: "name" }, words(data.x)));
      svg.append(element("text", { transform: `translate(14 ${(TOP + low) / 2}) rotate(-90)`, "text-anchor": "middle", class: "name" }, words(data.y)));
      for (const name of names.filter((one) => !hidden.has(one))) {
        const own = shown.filter((row) => row[data.series] === name), color = data.colors[name];
        const dash = DASHES[own[0]?.evidence] || "none";
        if (!x.texts) svg.append(element("polyline", { points: line(own, data, x, y), stroke: color, "stroke-dasharray": dash, class: "curve" }));
        for (const row of own) svg.append(element("circle", { cx: x.at(row[data.x]), cy: y.at(row[data.y]), r: 3.2, fill: color }));
      }
      const ring = element("circle", { r: 7, class: "ring", visibility: "hidden" });
      svg.append(ring);
      svg.addEventListener("pointermove", (event) => tell(event, svg, ring, shown, x, y));
      drawing.replaceChildren(svg);
      legend.replaceChildren(...names.map((name) => {
        const box = html("input", { type: "checkbox", checked: !hidden.has(name) });
        box.addEventListener("change", () => { box.checked ? hidden.delete(name) : hidden.add(name); redraw(); });
        const swatch = html("i");
        swatch.style.background = data.colors[name];
        return html("label", {}, box, swatch, ` ${data.labels[name]}`);
      }));
    }

    function tell(event, svg, ring, shown, x, y) {
      const box = svg.getBoundingClientRect(), scale = width / box.width;
      const [px, py] = [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
      const far = (row) => Math.hypot(x.at(row[data.x]) - px, y.at(row[data.y]) - py);
      const nearest = shown.reduce((best, row) => best === null || far(row) < far(best) ? row : best, null);
      if (nearest === null || far(nearest) > 40) return;
      for (const [key, value] of [["cx", x.at(nearest[data.x])], ["cy", y.at(nearest[data.y])], ["visibility", "visible"]]) ring.setAttribute(key, value);
      const values = Object.entries(nearest).filter(([, value]) => value !== null && value !== "");
      told.replaceChildren(...values.map(([name, value]) => html("div", {}, html("dt", {}, words(name)), html("dd", {}, written(value)))));
    }

    for (const choice of choices) choice.addEventListener("change", redraw);
    told.append(html("div", {}, html("dt", {}, "point at a mark to read its row")));
    redraw();
  }

  for (const view of document.querySelectorAll("details.view")) {
    view.addEventListener("toggle", () => draw(view.querySelector(".chart"), JSON.parse(view.querySelector("script").textContent)), { once: true });
  }
})();
