// Listens for server-sent events and passes them on, as events of <body> that htmx and the
// other scripts wait for. The address says what the page has seen, so nothing is missed. A hidden page closes its connection: a browser opens few to one host.
const url = document.body.dataset.events;
const indicator = document.querySelector(".live");
let source = null;

function show(state, text) {
  if (indicator.dataset.state === state) return;
  indicator.dataset.state = state;
  indicator.textContent = text;
}

function announce(name) {
  // A refreshed list would lose the runs that were chosen in it.
  if (document.querySelector("input[type=checkbox][name=with]:checked:not([checked])")) return;
  document.body.dispatchEvent(new CustomEvent(name));
}

function open() {
  source = new EventSource(url);
  source.onopen = () => show("live", "live");
  source.onerror = () => show("lost", "not connected");
  for (const name of ["rounds", "beat"]) source.addEventListener(name, () => announce(name));
}

function follow() {
  if (document.hidden) {
    source?.close();
    source = null;
  } else if (!source) {
    open();
  }
}

if (url && indicator) {
  document.addEventListener("visibilitychange", follow);
  window.addEventListener("pagehide", () => source?.close());
  follow();
}
