// The claims ledger: notes open, it filters and sorts, and what it shows stands in the address, behind "#ledger?".
(() => {
  const form = document.querySelector(".filters"), table = document.querySelector(".ledger");
  const claims = [...table.tBodies], fields = ["text", "verdict", "measured", "evidence", "figure"];
  const sorts = {
    apart: (a, b) => b.dataset.apart - a.dataset.apart,
    verdict: (a, b) => b.dataset.severity - a.dataset.severity,
    evidence: (a, b) => a.dataset.evidence.localeCompare(b.dataset.evidence),
  };
  const inOrder = (a, b) => claims.indexOf(a) - claims.indexOf(b);
  const FEW = 20;  // a link to so few claims opens their notes
  let sort = "";

  function open(claim, yes) {
    claim.classList.toggle("opened", yes);
    claim.querySelector(".open").setAttribute("aria-expanded", claim.classList.contains("opened"));
  }

  function fits(claim) {
    return claim.textContent.toLowerCase().includes(form.text.value.trim().toLowerCase())
      && (!form.verdict.value || claim.dataset.verdict === form.verdict.value)
      && (!form.measured.value || claim.dataset.measured === form.measured.value)
      && (!form.evidence.value || claim.dataset.evidence === form.evidence.value)
      && (!form.figure.value || claim.dataset.figure.split(" ").includes(form.figure.value));
  }

  function show() {
    for (const claim of claims) claim.hidden = !fits(claim);
    const sorted = [...claims].sort((a, b) => (sorts[sort] ? sorts[sort](a, b) : 0) || inOrder(a, b));
    table.append(...sorted);
    for (const button of table.querySelectorAll("[data-sort]")) button.classList.toggle("on", button.dataset.sort === sort);
    form.querySelector("output").textContent = `${claims.filter((claim) => !claim.hidden).length} of ${claims.length}`;
  }

  function keep() {
    const query = new URLSearchParams(fields.map((name) => [name, form[name].value]).filter(([, value]) => value));
    if (sort) query.set("sort", sort);
    history.replaceState(null, "", query.size ? `#ledger?${query}` : "#ledger");
    show();
  }

  function fill(query) {
    for (const name of fields) {
      form[name].value = query.get(name) || "";
      if (form[name].selectedIndex === -1) form[name].value = "";
    }
    sort = query.get("sort") in sorts ? query.get("sort") : "";
    show();
  }

  function arrive() {
    const [place, query] = location.hash.slice(1).split("?"), target = document.getElementById(place);
    if (place === "ledger") fill(new URLSearchParams(query));
    const shown = claims.filter((claim) => !claim.hidden);
    if (query && shown.length <= FEW) for (const claim of shown) open(claim, true);
    if (claims.includes(target)) {
      if (target.hidden) fill(new URLSearchParams());
      open(target, true);
    }
    for (const claim of claims) claim.classList.toggle("reached", claim === target);
    if (target) target.scrollIntoView();
  }

  for (const claim of claims) {
    claim.querySelector(".line").addEventListener("click", (event) => {
      if (!event.target.closest("a")) open(claim, !claim.classList.contains("opened"));
    });
    open(claim, false);
  }
  for (const button of table.querySelectorAll("[data-sort]")) {
    button.addEventListener("click", () => { sort = button.dataset.sort; keep(); });
  }
  form.addEventListener("input", keep);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", (event) => { event.preventDefault(); fill(new URLSearchParams()); keep(); });
  form.querySelector(".open-all").addEventListener("click", () => {
    const shown = claims.filter((claim) => !claim.hidden);
    const yes = !shown.every((claim) => claim.classList.contains("opened"));
    for (const claim of shown) open(claim, yes);
  });
  addEventListener("hashchange", arrive);
  show();
  if (location.hash) arrive();
})();
