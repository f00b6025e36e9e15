"""The fixed parts of figures/index.html: its frame, its style sheet and the few lines of script that filter the ledger.

No fonts, scripts or pictures from elsewhere. Without a script the page shows everything; below 760 pixels tables turn
into cards. The module knows nothing of what fills the frame (see `repro.report.page`).
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>PagedAttention, reproduced</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>PagedAttention, reproduced</h1>
<p>The figures and claims of <i>Efficient Memory Management for Large Language Model Serving with PagedAttention</i>
(Kwon et al., SOSP 2023, <a href="https://arxiv.org/abs/2309.06180">arXiv:2309.06180</a>) beside our own numbers. Each
says what it is: <b>exact</b> (arithmetic), <b>replayed</b> (allocator and scheduler on a trace), <b>modelled</b> (a
cost model in virtual time), <b>measured</b> (this machine) or <b>recorded</b> (measured earlier, on the GPU named).</p>
{summary}
</header>
<nav>{contents}<a href="#ledger">Claims ledger</a><a href="#machines">Machines</a></nav>
<main>
<h2>Figures</h2>
{experiments}
<h2 id="ledger">Claims ledger</h2>
<div class="filters"><input type="search" placeholder="filter claims" aria-label="filter claims">
<button data-verdict="">all</button> <span class="shown"></span></div>
<table class="cards ledger"><thead><tr><th>claim</th><th class="n">paper</th><th class="n">ours</th><th>verdict</th>
<th>rule and note</th></tr></thead><tbody>
{ledger}
</tbody></table>
<h2 id="machines">Machines, versions, commits</h2>
{machines}
</main>
<script>{script}</script>
</body>
</html>
"""

STYLE = """
:root{--ink:#1d232b;--soft:#5b6470;--line:#dfe3e8;--paper:#fff;--back:#f6f7f9;--link:#0b5cad;
--reproduced:#1b7f4b;--differs:#b3261e;--contradictory:#8a4fbd;--reported:#2166ac;--calibration:#8a6d1c;--not:#8b939d}
*{box-sizing:border-box}
html{scroll-behavior:smooth}
body{margin:0;background:var(--back);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif}
header,main,nav{max-width:1180px;margin:auto;padding:0 20px}
header{padding-top:28px}
header>p{max-width:78ch;color:var(--soft)}
h1{margin:0;font-size:30px;letter-spacing:-.02em}
h2{margin:44px 0 12px;font-size:22px;scroll-margin-top:56px}
h3{margin:0;font-size:17px}
a{color:var(--link);text-decoration:none}a:hover{text-decoration:underline}
code{font-size:.88em;background:#eef0f3;border-radius:4px;padding:1px 5px}
.bar{display:flex;height:12px;border-radius:6px;overflow:hidden;gap:2px;margin:18px 0 10px}
.bar span{background:var(--c)}
.counts{display:flex;flex-wrap:wrap;gap:8px;align-items:center}
.v{--c:var(--not)}
.v-reproduced{--c:var(--reproduced)}.v-differs{--c:var(--differs)}.v-contradictory{--c:var(--contradictory)}
.v-reported{--c:var(--reported)}.v-calibration{--c:var(--calibration)}.v-not{--c:var(--not)}
.v{display:inline-block;color:var(--c);border:1px solid var(--c);border-radius:12px;padding:1px 10px;font-size:13px;
background:var(--paper);white-space:nowrap}
button{font:inherit;font-size:13px;cursor:pointer;border:1px solid var(--line);border-radius:12px;padding:1px 10px;
background:var(--paper);color:var(--soft)}
button.on{background:var(--c,var(--ink));color:#fff}
nav{position:sticky;top:0;z-index:2;background:var(--back);display:flex;gap:18px;overflow-x:auto;white-space:nowrap;
padding-top:12px;padding-bottom:10px;border-bottom:1px solid var(--line);margin-top:18px;font-size:14px}
section{background:var(--paper);border:1px solid var(--line);border-radius:10px;padding:20px;margin:0 0 20px;
scroll-margin-top:56px}
section .links{margin:2px 0 0}
.links{font-size:13px;color:var(--soft)}.links a{margin-right:6px}
figure{margin:18px 0 0}
figure img{display:block;width:100%;max-width:960px;height:auto;margin:auto;background:#fff}
figcaption{max-width:84ch;margin:8px auto 0;color:var(--soft);font-size:14px}
.badge{display:inline-block;background:var(--ink);color:#fff;border-radius:4px;padding:0 7px;font-size:12px}
.judged{margin:16px 0 0;font-size:13px;color:var(--soft);line-height:2}
.judged .v{font-size:12px;padding:0 8px}
.filters{display:flex;flex-wrap:wrap;gap:8px;align-items:center;margin-bottom:10px;color:var(--soft);font-size:13px}
input{font:inherit;padding:5px 10px;border:1px solid var(--line);border-radius:8px;min-width:240px}
table{border-collapse:collapse;width:100%}
.cards{background:var(--paper);border:1px solid var(--line);border-radius:10px;font-size:14px}
.cards>thead th{text-align:left;font-size:12px;color:var(--soft);font-weight:600;padding:8px 12px}
.cards>tbody>tr{scroll-margin-top:56px}
.cards>tbody>tr>td{border-top:1px solid var(--line);padding:9px 12px;vertical-align:top}
.cards>tbody>tr:target{background:#fff8dc}
.ledger>tbody>tr>td:first-child{width:28%}.ledger>tbody>tr>td:last-child{width:25%}
.n,.cards>thead th.n{text-align:right;font-variant-numeric:tabular-nums}
.note,.unit,.interval{color:var(--soft);font-size:12.5px;margin:2px 0 0}
.interval{white-space:nowrap}
.cards>tbody>tr>td.n>.interval{display:block}
.keys{font-size:13px;width:auto;min-width:100%}
.keys th{font-weight:400;white-space:nowrap;text-align:left;color:var(--soft);padding:0 8px 0 0}
.keys th.n{text-align:right;padding:0 0 0 10px;font-size:12px}
.keys td{padding:0 0 0 10px;white-space:nowrap}
.keys .apart{color:var(--soft);font-size:12px}
.v-reproduced-key>td:nth-child(3){color:var(--reproduced)}
.v-differs-key>td:nth-child(3){color:var(--differs);font-weight:600}
.v-contradictory-key>td:nth-child(3){color:var(--contradictory)}.v-reported-key>td:nth-child(3){color:var(--reported)}
summary{cursor:pointer;color:var(--link)}
@media (max-width:760px){
header,main,nav{padding-left:12px;padding-right:12px}h1{font-size:25px}section{padding:14px}
.cards>thead{display:none}
.cards,.cards>tbody,.cards>tbody>tr,.cards>tbody>tr>td{display:block;width:100%!important}
.cards>tbody>tr{border-top:6px solid var(--back);padding:8px 0}
.cards>tbody>tr>td{border:0;padding:3px 12px;text-align:left}
.cards>tbody>tr>td:not([data-label=''])::before{content:attr(data-label);display:inline-block;min-width:76px;
font-size:12px;color:var(--soft)}
.cards .note{overflow-wrap:anywhere}
input{width:100%}.cards>tbody>tr>td{overflow-x:auto}
}
"""

SCRIPT = """
(function () {
  var rows = [].slice.call(document.querySelectorAll(".ledger > tbody > tr"));
  var buttons = [].slice.call(document.querySelectorAll("button[data-verdict]"));
  var search = document.querySelector("input[type=search]"), shown = document.querySelector(".shown"), verdict = "";
  function update() {
    var words = search.value.toLowerCase(), count = 0;
    rows.forEach(function (row) {
      var fits = (!verdict || row.dataset.verdict === verdict) && row.textContent.toLowerCase().indexOf(words) >= 0;
      row.hidden = !fits; row.style.display = fits ? "" : "none"; count += fits;
    });
    buttons.forEach(function (button) {
      button.classList.toggle("on", button.dataset.verdict === verdict && !!verdict);
    });
    shown.textContent = count + " of " + rows.length + " shown";
  }
  buttons.forEach(function (button) {
    button.addEventListener("click", function () {
      verdict = button.dataset.verdict === verdict ? "" : button.dataset.verdict;
      update();
      if (button.closest("header")) { document.getElementById("ledger").scrollIntoView(); }
    });
  });
  search.addEventListener("input", update);
  update();
})();
"""
