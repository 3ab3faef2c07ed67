"""Answers to `why`, for the page: what the command line would say, or why it cannot say it."""

import traceback
from dataclasses import asdict
from typing import Any

from lookup_buffer.cli.exits import CommandError
from lookup_buffer.errors import InvalidKey
from lookup_buffer.inspection.findings import THERE, UNDER_WAY, Finding
from lookup_buffer.inspection.history import history_of
from store import MetadataStore, StoreError, StoreRefused, StoreUnavailable


def answer(store: MetadataStore, key: str, namespace: str) -> dict[str, Any]:
    """The findings of `key`, or with `problem` a sentence; never an error."""
    try:
        history = history_of(store, key, namespace)
        findings = list(history.findings())
    except (CommandError, InvalidKey, ValueError) as error:
        return {"key": key, "problem": str(error)}
    except StoreError as error:
        return {"key": key, "problem": trouble_text(error)}
    except Exception:  # noqa: BLE001 -- top of a thread: a bug of ours must leave no page waiting
        traceback.print_exc()  # into the node's log
        return {"key": key, "problem": "that question failed; the node's log says why"}
    return {
        "key": history.key,
        "found": any(one.code in THERE for one in findings),
        "findings": [{**asdict(one), "state": _state(one)} for one in findings],
    }


def trouble_text(error: StoreError) -> str:
    """Why the store says nothing, and what to do."""
    text = " ".join(str(error).split())
    if isinstance(error, StoreRefused) and error.forbidden:
        return f"{text}; give the user the rights in docs/redis-keys.md"
    if isinstance(error, StoreUnavailable):
        return f"Redis is not reached: {text}"
    return text


def _state(finding: Finding) -> str:
    if finding.code in THERE:
        return "there"
    return "coming" if finding.code in UNDER_WAY else "missing"
