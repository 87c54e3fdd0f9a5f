"use strict";
// The slider of the sample grids: one picture of a run is shown, the others are hidden.
for (const slider of document.querySelectorAll("[id^='samples-slider']")) {
  const end = slider.id.slice("samples-slider".length);
  const pictures = document.querySelectorAll(`#samples-image${end} > [data-images]`);
  const seen = document.getElementById(`samples-seen${end}`);
  const show = () => {
    pictures.forEach((picture, place) => { picture.hidden = place !== Number(slider.value); });
    seen.textContent = Number(pictures[slider.value].dataset.images).toLocaleString("en-US");
    slider.setAttribute("aria-valuetext", `${seen.textContent} images`);
  };
  slider.value = slider.max;
  slider.hidden = pictures.length < 2;
  slider.addEventListener("input", show);
  show();
}
