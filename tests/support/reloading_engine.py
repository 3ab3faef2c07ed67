"""A vLLM engine that is given other weights while it runs: `python reloading_engine.py SOCKET`.

SOCKET is the number of an inherited socket, on which it is told what to do and answers. Its cache
holds one picture, and it gets requests about two, by turns. Its answers are those about the second:
with the weights of its start, and then with the others, twice, the second time under an unknown
name.
"""

import json
import socket
import sys
from typing import Any

PROMPT = "<image>What is in this picture?"


def main() -> None:
    from PIL import Image
    from vllm import LLM, SamplingParams

    connection = socket.socket(fileno=int(sys.argv[1])).makefile("rw")
    given = json.loads(connection.readline())
    first, second = (Image.open(path).convert("RGB") for path in given["pictures"])
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    engine = LLM(**given["arguments"])

    def ask(picture: Any, **named: Any) -> list[int]:
        prompt: Any = {"prompt": PROMPT, "multi_modal_data": {"image": [picture]}, **named}
        (output,) = engine.generate([prompt], sampling, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    ask(first)
    answers = [ask(second)]
    print("STORED", file=connection, flush=True)
    connection.readline()
    ask(first)
    engine.collective_rpc("reload_weights", kwargs={"weights_path": given["other_weights"]})
    engine.llm_engine.reset_encoder_cache()  # as vLLM wants it done when weights have changed
    answers.append(ask(second))
    answers.append(ask(second, multi_modal_uuids={"image": ["a name of its own"]}))
    print("ANSWERS", json.dumps(answers), file=connection, flush=True)
    engine.llm_engine.engine_core.shutdown(timeout=10.0)


if __name__ == "__main__":
    main()
