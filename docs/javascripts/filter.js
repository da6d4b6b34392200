// A field above the tables of the page of settings, which hides the rows without the words typed into it.
"use strict";
if (document.querySelector("h1")?.textContent.startsWith("Settings")) {
  const field = Object.assign(document.createElement("input"), {
    type: "search", className: "filter", placeholder: "Filter settings, for example: media bytes", ariaLabel: "Filter settings",
  });
  document.querySelector("h1").after(field);
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const table of document.querySelectorAll(".md-content table")) {
      let shown = 0;
      for (const row of table.tBodies[0].rows) {
        row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
        shown += !row.hidden;
      }
      (table.closest(".md-typeset__scrollwrap") || table).hidden = !shown;
    }
  });
}
