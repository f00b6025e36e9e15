// What the maps of a page have in common: the iteration that is seen, who is followed, and what a reader moves them by.
// A page's maps are { name: what repro.history.map_page gives }, `parting` is the frame at which two runs part.
(async () => {
  const { maps: runs, parting } = JSON.parse(await textOf("run"));
  const find = (selector) => document.querySelector(selector);
  const scrub = find("input[name=step]"), playing = find("[name=play]"), speed = find("[name=speed]");
  const span = find("[name=span]"), all = Object.values(runs);
  const frames = Math.max(...all.map((run) => run.start_s.length)), first = all[0].first;
  const present = new Set(all.flatMap((run) => jumpsOf(run, parting)).map(({ name }) => name));
  const rows = JUMPS.map(([name]) => name).filter((name) => present.has(name));
  const view = { moment: 0, followed: null, parting, rows, shown, goTo, follow };

  function shown() {
    const wide = Number(span.value) || frames, from = Math.max(0, Math.min(view.moment - (wide >> 1), frames - wide));
    return [from, Math.min(frames, from + wide)];
  }

  function draw() {
    scrub.value = view.moment;
    for (const map of maps) map.draw();
    const whens = maps.map((map) => map.when()).join("");
    find("output[name=step]").textContent =
      `iteration ${many(first + view.moment)} / ${many(first + frames - 1)}${whens}`;
  }

  function goTo(frame) {
    view.moment = Math.max(0, Math.min(frames - 1, Math.round(frame)));
    draw();
  }

  function follow(request) {
    view.followed = request;
    find(".followed").hidden = request === null;
    if (request !== null) find(".followed span").textContent = `Following ${maps[0].about(request)}`;
    for (const map of maps) map.mark();
    draw();
  }

  scrub.addEventListener("input", () => goTo(Number(scrub.value)));
  span.addEventListener("change", draw);
  find("[name=unfollow]").addEventListener("click", () => follow(null));

  document.addEventListener("keydown", (event) => {
    if (event.target.matches("select, button, input:not([type=range])")) return;
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -100, PageDown: 100 }[event.key] * (event.shiftKey ? 10 : 1);
    const to = { Home: 0, End: frames - 1 }[event.key] ?? (by ? view.moment + by : null);
    if (to === null) return;
    event.preventDefault();
    goTo(to);
  });

  let began = 0, from = 0;
  function playOn(now) {
    if (!began) return;
    const next = from + (now - began) / 1000 * Number(speed.value);
    if (Math.floor(next) !== view.moment) goTo(Math.floor(next));
    if (view.moment < frames - 1) requestAnimationFrame(playOn);
    else stop();
  }
  function showPlaying() { [playing.textContent, playing.ariaLabel] = began ? ["❚❚", "pause"] : ["▶", "play"]; }
  function stop() { began = 0; showPlaying(); }
  function play() {
    [began, from] = [performance.now(), view.moment === frames - 1 ? 0 : view.moment];
    showPlaying();
    requestAnimationFrame(playOn);
  }
  playing.addEventListener("click", () => began ? stop() : play());
  speed.addEventListener("change", () => { if (began) play(); });

  function lay() {
    for (const map of maps) map.lay();
    for (const map of maps) map.drawKey();
    draw();
  }
  onTheme(lay);
  addEventListener("resize", lay);

  for (const option of [...span.options]) if (Number(option.value) >= frames) option.remove();
  scrub.max = frames - 1;
  const maps = Object.entries(runs).map(([name, run]) => memoryMap(name, run, view));
  lay();
  if (parting !== null) goTo(parting);
  document.body.dataset.state = "settled";
})().catch((error) => {
  document.querySelector(".readout").textContent = `This map cannot be shown: ${error.message}.`;
  throw error;
});
