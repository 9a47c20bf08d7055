// The page: choose the view for an address, move the focus to its heading, and poll the server while a run is live.
//
// A view is a function (route, site) -> {title, element, shortcuts?, opened?, update?, updateStatus?, close?}. `site`
// is the server's list of sources, which this file keeps up to date. A view changes nothing outside its element.

import { redrawCharts } from "./charts.js";
import { get, isExport } from "./data.js";
import { button, el, visible } from "./dom.js";
import { listenForKeys, setShortcuts, showKeys } from "./keys.js";
import { listView } from "./list.js";
import { overviewView } from "./overview.js";
import { playView } from "./play.js";
import { listHref, overviewHref, parse, playHref } from "./routes.js";
import { newestFile } from "./sources.js";
import { showError } from "./status.js";
import { themeToggle } from "./theme.js";
import { trajectoryView } from "./trajectory.js";

const LIVE_POLL_MS = 2000;
const IDLE_POLL_MS = 10000; // a run that has stopped writing can still continue later
const STATUS_MS = 10000; // "written 8 s ago" must be updated even without a new version
const VIEWS = { overview: overviewView, list: listView, trajectory: trajectoryView, play: playView };

const site = { version: 0, live: false, can_play: false, sources: [], differing: {} };
const main = document.getElementById("main");
let view = null;
let navigations = 0;

function problemView(title, error) {
  const home = el("p", {}, el("a", { href: "#/" }, "To the overview"));
  return { title, element: el("div", { class: "problem" }, el("h1", {}, title), el("p", {}, error.message), home) };
}

async function viewOf(route) {
  if (route.view === "unknown") return problemView("No such page", { message: `There is no page at ${location.hash}.` });
  if (route.view === "play" && (isExport || !site.can_play)) {
    return problemView("No live play here", { message: "Live play needs the server and an installed environment." });
  }
  if (route.view !== "play" && !site.sources.some(({ id }) => id === route.source)) {
    return problemView("No such source", { message: `There is no source ${route.source}.` });
  }
  try {
    return await VIEWS[route.view](route, site);
  } catch (error) {
    if (error.name !== "Error") console.error(error);
    return problemView("This cannot be shown", error);
  }
}

function showNavigation(route) {
  const source = site.sources.find(({ id }) => id === route.source) ?? site.sources[0];
  const file = source && newestFile(source);
  const pages = [
    source && ["overview", overviewHref(source.id), "Overview"],
    file && ["list", listHref(source.id, file.name), "Trajectories"],
    site.can_play && !isExport && ["play", playHref(), "Live play"],
  ];
  const links = pages.filter(Boolean).map(([name, href, label]) => {
    const current = route.view === name ? "page" : route.view === "trajectory" && name === "list" ? "true" : null;
    return el("li", {}, el("a", { href, "aria-current": current }, label));
  });
  document.getElementById("nav").replaceChildren(el("span", { class: "brand" }, "Replay"), el("ul", {}, links));
}

/** Show the view of the address; `moveFocus`: after a navigation, move the focus to the new heading. */
async function show(moveFocus) {
  const navigation = ++navigations;
  const route = parse(location.hash);
  main.setAttribute("aria-busy", "true");
  const next = await viewOf(route);
  if (navigation !== navigations) {
    next.close?.();
    return;
  }
  view?.close?.();
  view = next;
  main.replaceChildren(next.element);
  main.removeAttribute("aria-busy");
  document.title = `${visible(next.title)} · Replay`;
  setShortcuts(next.shortcuts ?? []);
  showNavigation(route);
  scrollTo(0, 0);
  const heading = main.querySelector("h1");
  heading.tabIndex = -1;
  if (moveFocus) heading.focus({ preventScroll: true });
  next.opened?.();
}

function showTools() {
  const live = site.live && !isExport ? el("span", { class: "live" }, "live") : null;
  const tools = [live, button("Keys", showKeys), themeToggle(redrawCharts)].filter(Boolean);
  document.getElementById("tools").replaceChildren(...tools);
}

async function refreshSite() {
  const { live } = site;
  Object.assign(site, await get("sources"));
  if (live !== site.live) showTools();
  showNavigation(parse(location.hash));
}

/** Ask for the version and update the view if it has changed; returns the time since the last status update. */
async function poll(statusAge, pause) {
  if (document.hidden) return statusAge;
  const { version } = await get("version");
  if (version !== site.version) {
    await refreshSite();
    await view?.update?.();
    return 0;
  }
  if (statusAge < STATUS_MS) return statusAge + pause;
  await refreshSite();
  view?.updateStatus?.();
  return 0;
}

async function keepPolling() {
  let statusAge = 0;
  let silent = false;
  for (;;) {
    const pause = site.live ? LIVE_POLL_MS : IDLE_POLL_MS;
    await new Promise((resolve) => setTimeout(resolve, pause));
    try {
      statusAge = await poll(statusAge, pause);
      silent = false;
    } catch (error) {
      if (!silent) showError(error); // only the first time
      silent = true;
    }
    document.body.classList.toggle("silent", silent);
  }
}

async function start() {
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the hash is the address of a view, not of an element
    main.focus();
  });
  // The cookie has the token now. Without it the address can be shown and copied.
  if (location.search) history.replaceState(null, "", location.pathname + location.hash);
  listenForKeys();
  showTools();
  try {
    await refreshSite();
  } catch (error) {
    main.replaceChildren(problemView("Nothing to show", error).element);
    return;
  }
  addEventListener("hashchange", () => show(true));
  await show(false);
  if (!isExport) keepPolling();
}

start();
