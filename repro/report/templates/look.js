// Looking at figures: a click shows one as large as the window, another click in its own size; the navigation follows.
(() => {
  const dialog = document.querySelector(".zoomed"), place = dialog.querySelector("div");
  for (const link of document.querySelectorAll("a.zoom")) {
    link.addEventListener("click", (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      const picture = link.querySelector("img").cloneNode();
      picture.loading = "eager";
      picture.addEventListener("click", () => picture.classList.toggle("large"));
      place.replaceChildren(picture);
      dialog.showModal();
    });
  }
  dialog.addEventListener("click", (event) => { if (!event.target.closest("img")) dialog.close(); });

  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const places = [...links.keys()].map((id) => document.getElementById(id));
  let here = null;
  function follow() {
    const passed = places.filter((one) => one.getBoundingClientRect().top < innerHeight / 3);
    const link = links.get((passed.at(-1) || places[0]).id);
    if (link === here) return;
    if (here) here.removeAttribute("aria-current");
    here = link;
    here.setAttribute("aria-current", "true");
    const nav = here.parentElement;  // it scrolls on its own: sideways on a phone, down beside the figures
    nav.scrollTo(here.offsetLeft - nav.clientWidth / 3, here.offsetTop - nav.clientHeight / 3);
  }
  addEventListener("scroll", () => requestAnimationFrame(follow), { passive: true });
  follow();
})();
