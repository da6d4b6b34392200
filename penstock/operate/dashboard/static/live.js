// Replaces the live sections of the page with what the server renders, once per look.
const link = document.getElementById("link");
const lost = document.getElementById("lost"); // read out by screen readers; the time of each update is not
const pause = document.getElementById("pause");
const OLD_MS = 5000; // without an update: what is shown is marked as old
let paused = false;
let seen = Date.now();
let shown = "";

pause.addEventListener("click", () => {
  paused = !paused;
  pause.setAttribute("aria-pressed", paused);
  pause.textContent = paused ? "Continue" : "Pause";
});

const events = new EventSource("/live");
events.addEventListener("live", (event) => {
  const now = JSON.parse(event.data);
  seen = Date.now();
  document.body.classList.remove("old");
  link.textContent = "live, " + now.clock;
  if (lost.textContent) lost.textContent = "";
  if (paused) return;
  shown = now.clock;
  for (const [id, html] of Object.entries(now.sections)) {
    const element = document.getElementById(id);
    // What the keyboard is in stays as it is, and so does a selection.
    if (!element || (element !== document.activeElement && element.contains(document.activeElement))) continue;
    const selection = getSelection();
    if (!selection.isCollapsed && element.contains(selection.anchorNode)) continue;
    if (element.dataset.html !== html) {
      element.innerHTML = html;
      element.dataset.html = html;
    }
  }
});
setInterval(() => {
  if (paused || Date.now() - seen < OLD_MS) return;
  document.body.classList.add("old");
  link.textContent = shown ? "as of " + shown : "";
}, 1000);
events.onerror = () => {
  link.textContent = "";
  lost.textContent = "the dashboard does not answer; trying again";
};
