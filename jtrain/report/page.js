"use strict";

// Shows the chosen panel of those beside it.
document.querySelectorAll("select[data-panels]").forEach((chosen) => {
  function show() {
    chosen.closest("section").querySelectorAll("[data-panel]").forEach((one) => {
      one.hidden = one.dataset.panel !== chosen.value;
    });
  }
  chosen.addEventListener("change", show);
  show(); // browsers keep the chosen value when going back in the history
});

// Sorting: numbers start with the largest, words with A; a second click reverses. Rows past the limit stay hidden.
document.querySelectorAll("table[data-limit]").forEach((table) => {
  const more = table.closest("section").querySelector("button.more");
  const heads = [...table.tHead.rows[0].cells];
  let limit = Number(table.dataset.limit);
  function showRows() {
    [...table.tBodies[0].rows].forEach((row, index) => { row.hidden = index >= limit; });
    more.hidden = limit >= table.tBodies[0].rows.length;
  }
  function sortBy(head, column) {
    const rows = [...table.tBodies[0].rows];
    const key = (row) => row.cells[column].dataset.sort;
    const numeric = head.classList.contains("number");
    const before = head.getAttribute("aria-sort");
    const descending = before ? before === "ascending" : numeric;
    rows.sort((a, b) => {
      const order = numeric ? key(a) - key(b) : (key(a) > key(b)) - (key(a) < key(b));
      return descending ? -order : order;
    });
    for (const cell of heads) cell.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    table.tBodies[0].append(...rows);
    showRows();
  }
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => sortBy(head, column));
  });
  more.addEventListener("click", () => { limit = Infinity; showRows(); });
  showRows();
});
