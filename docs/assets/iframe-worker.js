// Pages that are opened from a folder (file:) may not start a Worker, in which the site's search runs. There a hidden frame takes
// its place: it loads the same script, and messages go to and fro as events. Served pages use Worker as it is.
"use strict";
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    #inside;
    #waiting = []; // messages that come before the script has run

    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.#inside = frame.contentWindow;
      this.#inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = frame.contentDocument.createElement("script");
      script.src = url;
      script.onload = () => {
        const waiting = this.#waiting;
        this.#waiting = null;
        waiting.forEach((data) => this.postMessage(data));
      };
      frame.contentDocument.body.append(script);
    }

    postMessage(data) {
      if (this.#waiting) this.#waiting.push(data);
      else setTimeout(() => this.#inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
  window.Worker = window.IFrameWorker;
}
