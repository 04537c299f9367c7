// Browsers start no worker for a page that is opened from a file: the search runs in a hidden frame there.
if (location.protocol === "file:") {
  window.fileWorkers = [];
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const number = window.fileWorkers.push(this) - 1;
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<script>
        const worker = parent.fileWorkers[${number}];
        self.postMessage = (data) => worker.dispatchEvent(new parent.MessageEvent("message", { data }));
      </script><script src="${new URL(url, location.href)}"></script>`;
      this.ready = new Promise((resolve) => (frame.onload = () => resolve(frame.contentWindow)));
      document.body.append(frame);
    }
    postMessage(data) {
      this.ready.then((frame) => frame.dispatchEvent(new frame.MessageEvent("message", { data })));
    }
  };
}
