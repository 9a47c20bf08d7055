"""The tabs of one episode: play an action, wait for its effects, read the page.

Waiting: An action is over when its effects are on the page: a navigation has finished, no request
    is open, and the document has stopped changing. A page without scripts changes only by
    navigation, so nothing else is waited for. All waits have limits (the constants below).
Failure: A tab that hangs, or opens dialogs or windows in a loop, is closed. An empty tab replaces
    the last one. The policy reads why, and other sessions notice nothing.
Safety: Requests outside the session's sites and downloads are refused, dialogs are dismissed, and
    new windows become tabs. The policy is told each of these.

Read next: envs/webarena/evaluators.py.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from envs.webarena.actions import Action
from envs.webarena.browser import CLOSE_S, Addresses, Browser, CannotAct
from envs.webarena.tree import HEIGHT, WIDTH, Node, Page, read_page

ACT_S = 8.0  # until the page has taken a click or a key
LOAD_S = 10.0  # until a page has answered, and again until it has loaded
LOOK_S = 8.0  # to read the page
QUIET_MS = 150  # without a change of the document and without a request
MAX_QUIET_S = 2.0  # for pages that never become quiet
WINDOW_S = 5.0  # until a new window has the answer to its first request
MAX_TABS = 10
MAX_POPUPS = 10  # dialogs and windows of a page in one action
MAX_ELEMENTS, MAX_CHARACTERS = 15_000, 1_000_000  # of a page that is shown
# Whether the document has loaded and stopped changing. Waits for it; at once if it has no scripts.
_IS_QUIET = """new Promise(done => {
  const begin = performance.now();
  let last = begin;
  const observer = new MutationObserver(() => { last = performance.now(); });
  observer.observe(document, {subtree: true, childList: true, attributes: true,
                              characterData: true});
  const check = () => {
    const now = performance.now(), isLoaded = document.readyState === 'complete';
    const rest = last + (document.scripts.length ? %d : 0) - now;
    if (isLoaded && rest <= 0 || now - begin > %d) { observer.disconnect(); done(isLoaded); }
    else setTimeout(check, Math.max(rest, 10));
  };
  setTimeout(() => setTimeout(check, 0), 0);
})"""
_SIZE = """[document.getElementsByTagName('*').length,
            (document.documentElement?.textContent || '').length]"""
_SELECT = """function(wanted) {
  const clean = text => text.trim().replace(/\\s+/g, ' ');
  const options = [...(this.options || [])];
  const option = options.find(o => clean(o.label) === wanted)
              || options.find(o => o.value === wanted);
  if (option === undefined) return options.map(o => clean(o.label));
  this.focus();
  option.selected = true;
  this.dispatchEvent(new Event('input', {bubbles: true}));
  this.dispatchEvent(new Event('change', {bubbles: true}));
  return null;
}"""
_IS_ONE_LINE = "document.activeElement instanceof HTMLInputElement"  # a line break presses Enter
_SCROLL = """(page => { page.scrollTop += %d * window.innerHeight; })
             (document.scrollingElement || document.body)"""


class Tab:
    """A page with what we need to know to wait for it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.requests: set[str] = set()  # ids of the open ones of the current action
        self.num_answers = 0  # requests that have ended
        self.num_popups = 0  # dialogs, and windows that the page tried to open, in this action
        self.awaited_windows = 0  # those that Chromium allows and that are not tabs yet
        self.num_windows = 0  # those that came, in this action
        self.problem = ""  # why its session closes the tab
        self._loading: set[str] = set()  # ids of frames
        page.on("crash", lambda _: self.give_up())
        self.devtools = _start(self._attach())

    async def _attach(self) -> Any:
        session = await self.page.context.new_cdp_session(self.page)
        # From the renderer and in order with the answers of evaluate(): a navigation that an action
        # has caused is known before the answer to the next command.
        for name in ("RequestedNavigation", "StartedLoading"):
            session.on(f"Page.frame{name}", self._note_loading)
        for name in ("StoppedLoading", "Detached"):
            session.on(f"Page.frame{name}", lambda e: self._loading.discard(e["frameId"]))
        session.on("Page.windowOpen", self._count_window)
        session.on("Network.requestWillBeSent", lambda e: self.requests.add(e["requestId"]))
        for name in ("Finished", "Failed"):
            session.on(f"Network.loading{name}", self._note_answer)
        await session.send("Page.enable")
        await session.send("Network.enable")
        return session

    def _note_loading(self, event: dict) -> None:
        if event.get("disposition", "currentTab") == "currentTab":
            self._loading.add(event["frameId"])

    def _note_answer(self, event: dict) -> None:
        self.requests.discard(event["requestId"])
        self.num_answers += 1

    @property
    def is_gone(self) -> bool:
        return bool(self.problem) or self.page.is_closed()

    def give_up(self, problem: str = "did not respond") -> None:
        self.problem = self.problem or problem

    def _count_window(self, event: dict) -> None:
        """Chromium allows a page one new window for each click; a loop gets no more."""
        self.awaited_windows += event["userGesture"]
        self.count_popup()

    def count_popup(self) -> None:
        """Close the page if it is in a loop, also while its code still runs."""
        self.num_popups += 1
        if self.num_popups > MAX_POPUPS and not self.problem:
            self.give_up("opened dialogs or windows in a loop")
            _start(self.page.close())

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of Chromium's DevTools protocol."""
        session = await asyncio.shield(self.devtools)
        return await session.send(method, parameters)

    async def evaluate(self, script: str) -> Any:
        answer = await self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        return answer["result"].get("value")

    async def settle(self) -> bool:
        """Wait until the page has loaded and is quiet, or is gone. False if it is still loading
        after LOAD_S seconds; its loading is then stopped."""
        end, quiet_end = time.monotonic() + LOAD_S, 0.0
        script = _IS_QUIET % (QUIET_MS, MAX_QUIET_S * 1000)
        while not self.is_gone and time.monotonic() < end:
            await asyncio.sleep(0.01)
            if self._loading:
                continue
            quiet_end = quiet_end or time.monotonic() + MAX_QUIET_S
            num_answers = self.num_answers
            try:
                has_loaded = await asyncio.wait_for(self.evaluate(script), ACT_S)
            except TimeoutError:
                self.give_up()
                return True
            except Exception:  # the document was replaced
                continue
            # A script changes the page a bit later than the answer to its request.
            is_quiet = not self.requests and self.num_answers == num_answers
            if has_loaded and (is_quiet or time.monotonic() > quiet_end) and not self._loading:
                return True
        if not self.is_gone:
            await self.stop_loading()
        return self.is_gone

    async def stop_loading(self) -> None:
        try:
            await asyncio.wait_for(self.send("Page.stopLoading"), 2)
        except Exception:
            self.give_up()
        self._loading.clear()


class Session:
    """One context: the tabs and cookies of one episode. All methods run in the browser's thread,
    by Browser.call."""

    tab: Tab  # the current one

    def __init__(self, browser: Browser, addresses: Addresses) -> None:
        self._browser, self.addresses = browser, addresses
        self._tabs: list[Tab] = []
        self._is_opening = False  # a tab of ours, about which the policy is not told
        self._notes: list[str] = []  # what happened beside the action

    async def open(self, urls: Sequence[str], cookies: dict | Path | None = None) -> Page:
        """Open the context and one tab for each real URL; return the page of the first. Raises
        CannotAct if a page does not open.

        Args:
            cookies: Playwright's "storage state", or a file with one.
        """
        self._context = await self._browser.chromium.new_context(
            viewport={"width": WIDTH, "height": HEIGHT},
            storage_state=cookies,
            accept_downloads=False,
            service_workers="block",
            locale="en-US",
            timezone_id="UTC",
            reduced_motion="reduce",
        )
        self._context.set_default_timeout(1000 * LOAD_S)
        self._context.on("page", self._add_tab)
        # Chromium compares the pattern; Python hears only of what is refused.
        origins = "|".join(map(re.escape, self.addresses.origins))
        outside = re.compile(rf"^(?!(?:{origins})(?:[/?#]|$)|data:|blob:|about:)")
        await self._context.route(outside, self._refuse)
        for url in urls:
            await self._new_tab(url)
        await self._focus(self._tabs[0])
        return await self.look()

    async def close(self) -> None:
        await asyncio.wait_for(self._context.close(), CLOSE_S)

    # ------------------------------------------------------------------ what happens by itself

    def _note(self, text: str) -> None:
        if text not in self._notes and len(self._notes) < 5:
            self._notes.append(text)

    async def _refuse(self, route: Any) -> None:
        request = route.request
        if request.is_navigation_request():
            self._note(f"The page wanted to open {request.url[:200]!r}, which is not on the sites.")
        with contextlib.suppress(Exception):  # the page was closed
            await route.abort("aborted")  # the tab stays where it is

    def _add_tab(self, page: Any) -> None:
        if not self._is_opening:
            self.tab.awaited_windows -= 1
            self.tab.num_windows += 1
            is_full = len(self._tabs) >= MAX_TABS
            if is_full or self.tab.num_windows > 1:  # not all browsers limit a click to one window
                reason = f"{MAX_TABS} are open" if is_full else "an action opens one"
                self._note(f"A new tab was closed, because {reason}.")
                _start(page.close())
                return
        tab = Tab(page)
        self._tabs.append(tab)
        page.on("dialog", lambda dialog: self._dismiss(tab, dialog))
        page.on("download", self._note_download)
        page.on("close", lambda _: self._forget(tab))
        if not self._is_opening:
            self._note(f"A new tab {len(self._tabs) - 1} was opened.")

    def _note_download(self, download: Any) -> None:
        self._note(f"The download of {download.suggested_filename[:100]!r} was refused.")

    def _forget(self, tab: Tab) -> None:
        if tab in self._tabs:
            self._tabs.remove(tab)

    async def _dismiss(self, tab: Tab, dialog: Any) -> None:
        tab.count_popup()
        with contextlib.suppress(Exception):  # the page was closed
            if dialog.type == "beforeunload":  # dismissed, it would keep the page
                await dialog.accept()
            else:
                self._note(f"A dialog said {dialog.message[:200]!r} and was dismissed.")
                await dialog.dismiss()

    # ------------------------------------------------------------------------------ actions

    async def step(self, action: Action, node: Node | None) -> tuple[Page, str, str]:
        """Play an action; return the page after it, why it had no effect ("" if it had), and what
        happened beside it.

        Args:
            node: the element of the last observation that the action names.
        """
        problem = ""
        self._notes.clear()
        for tab in self._tabs:
            tab.requests.clear()
            tab.num_popups = tab.awaited_windows = tab.num_windows = 0
        tab, old_tabs = self.tab, set(self._tabs)
        limit_s = max(ACT_S, LOAD_S + 1) + len(action.text) / 100  # long texts take longer to type
        try:
            await asyncio.wait_for(self._play(action, node), limit_s)
        except TimeoutError:
            tab.give_up()
        except CannotAct as error:
            problem = str(error)
        except Exception as error:
            if not tab.is_gone:
                problem = f"The browser reports: {_first_line(error)}."
        await self._settle()
        for tab in set(self._tabs) - old_tabs - {self.tab}:
            await tab.settle()
        page, public = await self.look(), self.addresses.to_public
        return page, public(problem), public(" ".join(self._notes))

    async def _settle(self) -> None:
        tab = self.tab
        if not tab.is_gone and not await tab.settle():
            self._note(f"The page did not finish loading within {LOAD_S:g} s.")
        end = time.monotonic() + WINDOW_S
        while tab.awaited_windows > 0 and not tab.is_gone and time.monotonic() < end:
            await asyncio.sleep(0.01)

    async def _play(self, action: Action, node: Node | None) -> None:
        page = self.tab.page
        match action.kind:
            case "hover":
                await page.mouse.move(*await self._point(node))
            case "click":
                await page.mouse.click(*await self._point(node))
            case "type":
                await page.mouse.click(*await self._point(node))
                text = re.sub(r"[\r\n]+", " ", action.text)
                if text != action.text and not await self.tab.evaluate(_IS_ONE_LINE):
                    text = action.text
                await page.keyboard.type(text)
                if action.enter:
                    await page.keyboard.press("Enter")
            case "select":
                await self._select(node, action.text)
            case "press":
                await page.keyboard.press(action.text)
            case "scroll":
                await self.tab.evaluate(_SCROLL % (1 if action.text == "down" else -1))
            case "goto":
                await self._goto(self.addresses.to_real(action.text))
            case "go_back" | "go_forward":
                await self._move(-1 if action.kind == "go_back" else 1)
            case "new_tab":
                if len(self._tabs) >= MAX_TABS:
                    raise CannotAct(f"{MAX_TABS} tabs are open, the maximum.")
                await self._new_tab()
            case "tab_focus":
                if action.number >= len(self._tabs):
                    raise CannotAct(f"There is no tab {action.number}.")
                await self._focus(self._tabs[action.number])
            case "close_tab":
                await page.close()
                await self._leave_tab()

    async def _new_tab(self, url: str = "") -> None:
        self._is_opening = True
        try:
            page = await self._context.new_page()
        finally:
            self._is_opening = False
        self.tab = next(tab for tab in self._tabs if tab.page is page)
        await self.tab.devtools
        if url:
            await self._goto(url)
            await self._settle()

    async def _focus(self, tab: Tab) -> None:
        self.tab = tab
        await tab.page.bring_to_front()

    async def _leave_tab(self) -> None:
        """Forget the current tab and go to another one. If there is none, open an empty one."""
        self._forget(self.tab)
        if self._tabs:
            self.tab = self._tabs[-1]
        else:
            await self._new_tab()

    async def _goto(self, url: str) -> None:
        try:
            await self.tab.page.goto(url, wait_until="commit")
        except Exception as error:
            await self.tab.stop_loading()
            raise CannotAct(f"The page did not open: {_first_line(error)}.") from error

    async def _move(self, offset: int) -> None:
        """Go back or forward in the tab's history."""
        history = await self.tab.send("Page.getNavigationHistory")
        index = history["currentIndex"] + offset
        if not 0 <= index < len(history["entries"]) or (
            index == 0 and history["entries"][0]["url"] == "about:blank"
        ):
            raise CannotAct(f"There is no page to go {'back' if offset < 0 else 'forward'} to.")
        go = self.tab.page.go_back if offset < 0 else self.tab.page.go_forward
        await go(wait_until="commit")

    async def _send(self, node: Node | None, command: str) -> dict[str, Any]:
        """A command about an element. Raises CannotAct if the element is gone."""
        if node is None:
            raise CannotAct("There is no such element on this screen.")
        try:
            return await self.tab.send(f"DOM.{command}", backendNodeId=node.backend_id)
        except Exception as error:
            if self.tab.page.is_closed():
                raise
            raise CannotAct(f"The element {node.line()[:200]} is no longer on the page.") from error

    async def _point(self, node: Node | None) -> tuple[float, float]:
        """The middle of an element, scrolled into view."""
        await self._send(node, "scrollIntoViewIfNeeded")
        quad = (await self._send(node, "getContentQuads"))["quads"][0]
        return sum(quad[0::2]) / 4, sum(quad[1::2]) / 4

    async def _select(self, node: Node | None, option: str) -> None:
        answer = await self.tab.send(
            "Runtime.callFunctionOn",
            functionDeclaration=_SELECT,
            objectId=(await self._send(node, "resolveNode"))["object"]["objectId"],
            arguments=[{"value": option}],
            returnByValue=True,
            userGesture=True,
        )
        names = answer["result"].get("value")
        if names is not None:
            listing = ", ".join(map(repr, names[:20])) or "none"
            raise CannotAct(f"There is no option {option[:100]!r}. The options are: {listing}.")

    # ------------------------------------------------------------------------------ looking

    async def look(self) -> Page:
        """The current page, with the tabs line. A tab that hangs is closed."""
        page = Page(self.addresses.to_public(self.tab.page.url), text="(no page can be shown)")
        for _ in range(3):  # the next tab can hang, too
            if self.tab.is_gone:
                problem = self.tab.problem or "closed its window"
                self._note(f"The page {problem}, so its tab was closed.")
                _start(self.tab.page.close())
                await self._leave_tab()
            try:
                page = await asyncio.wait_for(self._read(), LOOK_S)
                break
            except TimeoutError:
                self.tab.give_up()
            except Exception:  # the document was replaced
                await self._settle()
        names = [
            f"Tab {number}{' (current)' if tab is self.tab else ''}: {await self._title(tab)}"
            for number, tab in enumerate(self._tabs)
        ]
        text = f"{' | '.join(names)}\n\n{page.text}"
        return replace(page, text=self.addresses.to_public(text))

    async def _read(self) -> Page:
        url = self.addresses.to_public(self.tab.page.url)
        num_elements, num_characters = await self.tab.evaluate(_SIZE)
        if num_elements > MAX_ELEMENTS or num_characters > MAX_CHARACTERS:
            size = f"{num_elements} elements, {num_characters} characters"
            return Page(url, text=f"(this page is too large to be shown: {size})")
        snapshot, tree = await asyncio.gather(
            self.tab.send("DOMSnapshot.captureSnapshot", computedStyles=[]),
            self.tab.send("Accessibility.getFullAXTree"),
        )
        return read_page(url, tree["nodes"], snapshot)

    async def _title(self, tab: Tab) -> str:
        """The browser process knows it, so a tab that hangs is not asked."""
        with contextlib.suppress(Exception):
            answer = await asyncio.wait_for(tab.send("Target.getTargetInfo"), LOOK_S)
            return " ".join(answer["targetInfo"]["title"].split())[:200]
        return ""

    async def read(self, url: str, locator: str, preparations: Sequence[str]) -> str:
        """See evaluators.Final."""
        last = self.tab
        try:
            if url != "last":
                await self._new_tab(self.addresses.to_real(url))
            page = self.tab.page
            with contextlib.suppress(Exception):
                for script in preparations:
                    await page.evaluate(f"() => {script}")
            result = await (page.evaluate(f"() => {locator}") if locator else page.content())
            return self.addresses.to_public(str(result))
        except Exception:
            return ""
        finally:
            if self.tab is not last:
                await self.tab.page.close()
            self.tab = last

    async def screenshot(self) -> str:
        """The viewport as a data URL; "" if the page does not answer."""
        try:
            image = self.tab.send("Page.captureScreenshot", format="jpeg", quality=40)
            data = (await asyncio.wait_for(image, ACT_S))["data"]
        except Exception:
            return ""
        return f"data:image/jpeg;base64,{data}"


_started: set[asyncio.Future] = set()


def _start(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Future:
    """Run a coroutine whose error matters only to those who await it."""

    def forget(task: asyncio.Future) -> None:
        _started.discard(task)
        if not task.cancelled():
            task.exception()

    task = asyncio.ensure_future(coroutine)
    _started.add(task)  # the loop does not keep a reference to its tasks
    task.add_done_callback(forget)
    return task


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200].removeprefix("Page.goto: ").rstrip(".")
