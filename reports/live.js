"use strict";
// Asks for a newer page and puts it in place of this one; what the reader has moved, opened and focused stays so.
{
  const said = document.getElementById("live");
  said.style = "position: sticky; bottom: 0; margin: 0; padding: .5rem 1rem; max-width: none; background: var(--panel, Canvas); color: var(--ink, CanvasText)";
  const all = selector => [...document.querySelectorAll(selector)];
  const slider = "input[type=range]";
  const pictures = range => all(`#${range.id.replace("slider", "image")} img`);
  // An element's id, or its place among its like in what has one: the same in the newer page.
  const key = element => {
    if (element.id) return element.id;
    const home = element.parentElement.closest("[id]") ?? document.body, name = element.localName;
    return `${home.id} ${name} ${[...home.querySelectorAll(name)].indexOf(element)}`;
  };
  const kept = () => ({
    at: [scrollX, scrollY],
    focus: document.activeElement && document.activeElement !== document.body ? key(document.activeElement) : null,
    open: new Map(all("details").map(one => [key(one), one.open])),
    scrolled: new Map(all(".scroll").map(one => [key(one), [one.scrollLeft, one.scrollTop]])),
    // A slider at its end stays there: the newest is wanted.
    seen: new Map(all(slider).filter(one => one.value !== one.max).map(one => [key(one), pictures(one)[one.value]?.dataset.images])),
  });
  const restore = was => {
    for (const one of all("details")) one.open = was.open.get(key(one)) ?? one.open;
    for (const one of all(".scroll")) [one.scrollLeft, one.scrollTop] = was.scrolled.get(key(one)) ?? [0, 0];
    for (const one of all(slider)) {
      const place = pictures(one).findIndex(picture => picture.dataset.images === was.seen.get(key(one)));
      if (place >= 0) { one.value = place; one.dispatchEvent(new Event("input")); }
    }
    if (was.focus) all("a, button, input, summary, [tabindex]").find(one => key(one) === was.focus)?.focus({ preventScroll: true });
    scrollTo(...was.at);
  };
  const show = text => {
    const newer = new DOMParser().parseFromString(text, "text/html"), was = kept();
    const policy = page => page.querySelector("meta[http-equiv]").content;
    if (policy(newer) !== policy(document)) return location.reload();  // another kind of page, whose scripts are not allowed here
    const [scripts, tag] = [[...newer.querySelectorAll("script:not([data-live])")], newer.getElementById("live").dataset.tag];
    newer.querySelectorAll("script, #live").forEach(one => one.remove());
    document.title = newer.title;
    document.querySelector("style")?.replaceWith(newer.querySelector("style") ?? "");
    document.body.replaceChildren(...newer.body.childNodes, said);
    for (const script of scripts) {  // one that came by a parser would not run
      const again = document.createElement("script");
      again.textContent = script.textContent;
      document.body.append(again);
    }
    said.dataset.tag = tag;
    restore(was);
  };
  let isHeld = false, isAsking = false;
  for (const [event, is] of [["pointerdown", true], ["pointerup", false], ["pointercancel", false]]) addEventListener(event, () => { isHeld = is; });
  const ask = async () => {
    if (document.hidden || isHeld || isAsking) return;
    isAsking = true;
    try {
      const head = await fetch(location.href, { method: "HEAD", cache: "no-store" });
      if (head.headers.get("ETag") && head.headers.get("ETag") !== `"${said.dataset.tag}"`) {
        const page = await fetch(location.href, { cache: "no-store" }), text = await page.text();
        if (page.ok && !isHeld) show(text);
      }
      said.hidden = true;
    } catch {
      if (said.hidden) said.textContent = `Nobody answers there since ${new Date().toLocaleTimeString()}: this is what was last known.`;
      said.hidden = false;
    }
    isAsking = false;
  };
  setInterval(ask, Number(said.dataset.poll));
  document.addEventListener("visibilitychange", ask);
}
