// Set the theme before the page is painted; the button in the header switches it.
"use strict";

(() => {
  const THEMES = ["auto", "light", "dark"];
  const LABELS = { auto: "Theme of the system", light: "Light theme", dark: "Dark theme" };
  const SIGNS = { auto: "◐", light: "☀", dark: "☾" };
  const root = document.documentElement;

  function stored() {
    try {
      const theme = localStorage.getItem("tinkex-theme");
      return THEMES.includes(theme) ? theme : "auto";
    } catch {
      return "auto";
    }
  }

  function apply(theme) {
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
  }

  function show(button, theme) {
    button.textContent = SIGNS[theme];
    button.setAttribute("aria-label", `${LABELS[theme]}; switch`);
    button.title = LABELS[theme];
    button.hidden = false;
  }

  apply(stored());
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    show(button, stored());
    button.addEventListener("click", () => {
      const theme = THEMES[(THEMES.indexOf(stored()) + 1) % THEMES.length];
      try {
        localStorage.setItem("tinkex-theme", theme);
      } catch {
        // Without storage the choice holds for this page only.
      }
      apply(theme);
      show(button, theme);
      document.dispatchEvent(new CustomEvent("themechange"));
    });
  });
})();
