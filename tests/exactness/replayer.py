"""The fresh process: reads cases from its input, restores each, and answers with what differs."""

import json
import os
import sys
import traceback
import warnings
from pathlib import Path

MOST_DIFFERENCES = 5


def main() -> None:
    """Answers one JSON line per line of input, until the input ends."""
    # libraries print: they get the error stream, and the answers a descriptor of their own
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    from tests.exactness import bits, harness

    for line in sys.stdin:
        request = json.loads(line)
        try:
            case = harness.from_json(request["case"])
            recording = harness.load(Path(request["folder"]))
            found = list(bits.differences(recording.expected, harness.replay(recording, case)))
            answer = {"count": len(found), "first": found[:MOST_DIFFERENCES], "error": None}
        except Exception:
            answer = {"count": 0, "first": [], "error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
