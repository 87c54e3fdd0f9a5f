"use strict";
// Sorts the table of runs by the column whose head is pressed; what has no value stays last. The address keeps the order.
{
  const table = document.getElementById("runs"), heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const sort = (column, isDown) => {
    const key = row => row.cells[column].dataset.key, isNumber = [...body.rows].every(row => !isNaN(key(row)));
    const order = (a, b) => isNumber ? a - b : a.localeCompare(b, "en", { numeric: true });
    const rows = [...body.rows].sort((one, other) => {
      const [a, b] = [key(one), key(other)];
      return a === "" || b === "" ? (a === "") - (b === "") : isDown ? order(b, a) : order(a, b);
    });
    body.append(...rows);
    heads.forEach((head, place) => head.setAttribute("aria-sort", place !== column ? "none" : isDown ? "descending" : "ascending"));
  };
  heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
    const isDown = head.getAttribute("aria-sort") === "ascending";
    sort(column, isDown);
    history.replaceState(null, "", `#${isDown ? "-" : ""}${column}`);
  }));
  const [, down, column] = /^#(-?)(\d+)$/.exec(location.hash) ?? [];
  if (column < heads.length) sort(Number(column), down === "-");
}
