"use strict";
/* Sorting and filtering of tables. The page is complete without it. */
(function () {
  function value(row, column) {
    var cell = row.cells[column];
    if (!cell) { return ""; }
    if (cell.classList.contains("unknown")) { return null; }
    if (!cell.hasAttribute("data-v")) { return cell.textContent.trim().toLowerCase(); }
    var number = Number(cell.getAttribute("data-v"));
    return isNaN(number) ? cell.getAttribute("data-v") : number;
  }
  function compare(a, b) {
    if (typeof a === "number" && typeof b === "number") { return a - b; }
    return String(a).localeCompare(String(b), undefined, { numeric: true });
  }
  function sort(table, head, column, first) {
    var down = head.getAttribute("aria-sort") === "descending";
    var up = head.getAttribute("aria-sort") === "ascending";
    var way = down ? 1 : up ? -1 : first;
    var body = table.tBodies[0];
    var rows = Array.prototype.map.call(body.rows, function (row) { return [value(row, column), row]; });
    rows.sort(function (a, b) { /* unknown is last either way */
      if (a[0] === null || b[0] === null) { return (a[0] === null) - (b[0] === null); }
      return way * compare(a[0], b[0]);
    });
    Array.prototype.forEach.call(table.tHead.rows[0].cells, function (other) { other.removeAttribute("aria-sort"); });
    head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
    rows.forEach(function (pair) { body.appendChild(pair[1]); });
  }
  function sortable(table) {
    Array.prototype.forEach.call(table.tHead.rows[0].cells, function (head, column) {
      if (head.classList.contains("picture")) { return; }
      var button = document.createElement("button");
      button.type = "button";
      button.append.apply(button, Array.prototype.slice.call(head.childNodes));
      head.appendChild(button);
      var first = head.classList.contains("number") ? -1 : 1;
      button.addEventListener("click", function () { sort(table, head, column, first); });
    });
  }
  function filterable(table) {
    var tools = document.createElement("div");
    var label = document.createElement("label");
    var input = document.createElement("input");
    var count = document.createElement("output");
    tools.className = "tools";
    input.type = "search";
    input.id = table.id + "-filter";
    label.htmlFor = input.id;
    label.textContent = "Show rows with";
    input.placeholder = "user, account, job, partition, ...";
    count.setAttribute("role", "status");
    tools.append(label, input, count);
    var box = table.closest(".scroll") || table;
    box.parentNode.insertBefore(tools, box);
    var rows = Array.prototype.slice.call(table.tBodies[0].rows);
    var texts = rows.map(function (row) { return row.textContent.toLowerCase(); });
    var field = null; /* the link of a field of the map of GPUs whose jobs are shown */
    var clear = document.createElement("button");
    clear.type = "button";
    clear.textContent = "Show all jobs";
    clear.hidden = true;
    tools.append(clear);
    function on(row, number) { /* data-g: numbers of fields, as in "0-7 12" */
      return (row.getAttribute("data-g") || "").split(" ").some(function (part) {
        var ends = part.split("-");
        return ends[0] !== "" && number >= Number(ends[0]) && number <= Number(ends[ends.length - 1]);
      });
    }
    function text(number) { return number.toLocaleString("en"); }
    function apply() {
      var words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      var number = field && Number(field.getAttribute("data-g"));
      var shown = 0, held = 0;
      rows.forEach(function (row, i) {
        var here = !field || on(row, number);
        var hit = here && words.every(function (word) { return texts[i].indexOf(word) >= 0; });
        row.hidden = !hit;
        shown += hit ? 1 : 0;
        held += here ? 1 : 0;
      });
      clear.hidden = !field;
      var missing = field ? Number(field.getAttribute("data-n")) - held : 0;
      count.textContent = (words.length || field ? text(shown) + " of " + text(rows.length) + " rows" : "") +
        (field ? ": jobs on GPU " + field.getAttribute("data-gpu") : "") +
        (missing > 0 ? "; " + text(missing) + " more of them are not in this table" : "");
    }
    input.addEventListener("input", apply);
    clear.addEventListener("click", function () { field = null; apply(); input.focus(); });
    if (table.id === "jobs") {
      document.querySelectorAll("a[data-g]").forEach(function (link) {
        link.addEventListener("click", function (event) {
          event.preventDefault();
          field = link;
          input.value = "";
          apply();
          location.hash = "all"; /* the way back leads to the map */
          clear.focus({ preventScroll: true });
        });
      });
    }
    apply();
  }
  /* The index of reports: the rows of single clusters are hidden in the page itself. */
  function index(form) {
    var sections = Array.prototype.slice.call(document.querySelectorAll("section.reports"));
    var fields = ["search", "period", "cluster"].map(function (name) { return document.getElementById("index-" + name); });
    var trend = document.getElementById("index-trend");
    var count = form.querySelector("output");
    function apply() {
      var values = fields.map(function (field) { return field ? field.value : ""; });
      var words = values[0].toLowerCase().split(/\s+/).filter(Boolean);
      var shown = 0, all = 0;
      sections.forEach(function (section) {
        var here = 0;
        Array.prototype.forEach.call(section.querySelectorAll("tbody tr"), function (row) {
          var due = (row.getAttribute("data-cluster") || "") === values[2];
          var text = row.textContent.toLowerCase();
          var hit = due && words.every(function (word) { return text.indexOf(word) >= 0; });
          row.hidden = !hit;
          here += hit ? 1 : 0;
          all += due ? 1 : 0;
        });
        section.hidden = !here || (values[1] !== "" && values[1] !== section.getAttribute("data-period"));
        shown += section.hidden ? 0 : here;
      });
      if (trend) { trend.hidden = values[2] !== "" || (values[1] !== "" && values[1] !== "day"); }
      count.textContent = values.some(Boolean) ? shown.toLocaleString("en") + " of " + all.toLocaleString("en") + " reports" : "";
    }
    form.addEventListener("input", apply);
    form.addEventListener("submit", function (event) { event.preventDefault(); });
    form.hidden = false;
    apply(); /* a browser restores the fields of a page that was left */
  }
  document.querySelectorAll("form.index-tools").forEach(index);
  document.querySelectorAll("table.sortable").forEach(sortable);
  document.querySelectorAll("table.filterable").forEach(filterable);
}());
