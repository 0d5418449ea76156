(() => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  const wanted = new URLSearchParams(location.search).get("theme");
  const set = theme => { root.dataset.theme = theme; };
  set(["dark", "light"].includes(wanted) ? wanted : dark.matches ? "dark" : "light");
  window.switchTheme = () => set(root.dataset.theme == "dark" ? "light" : "dark");
})();
