// A page that the browser kept, and shows again, is read anew: its counts are of the time at which it was left.
addEventListener("pageshow", (event) => {
  if (event.persisted) location.reload();
});
