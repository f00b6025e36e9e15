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
