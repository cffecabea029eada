"""A scorer that notes what it is asked, for tests of who sends what, and takes its time where it is told to.

Its score depends on the prompt, so that a sample with another's caption changes the numbers.
"""

import hashlib
import os
import time


class Recording:
    name, batch_size = "recording", 1

    def load(self, weights, device):
        self._file = os.environ["DDRL_TEST_RECORD"]
        self._delay = float(os.environ.get("DDRL_TEST_DELAY", "0"))

    def score(self, videos, prompts):
        time.sleep(self._delay)
        scores = []
        for video, prompt in zip(videos, prompts, strict=True):
            with open(self._file, "a") as file:
                file.write(hashlib.sha256(video.numpy().tobytes() + prompt.encode()).hexdigest() + "\n")
            scores.append(float(video.double().mean()) + (sum(prompt.encode()) % 7) / 10)
        return {"overall": scores}
