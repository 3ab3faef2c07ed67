"""Stores of installed packages, found by the scheme of their URL.

Redis' own schemes are built in (see `url.py`) and go first. Any other scheme is the name of an
entry point in the group `lookup_buffer.stores`. Its value is a callable that opens the store, see
`docs/stores.md`. Installed distributions are searched only for such a scheme: that takes 50 ms and
more in an environment with vLLM.
"""

from typing import TYPE_CHECKING, Any, Final

from store.base import MetadataStore
from store.errors import StoreError, StoreUrlError
from store.url import SCHEMES, parse, redact

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

GROUP: Final = "lookup_buffer.stores"


def is_foreign(url: str) -> bool:
    """Whether a package has to open `url`: it has a scheme, and not one of Redis'."""
    scheme, separator, _ = url.partition("://")
    return bool(separator) and scheme.lower() not in SCHEMES


def unknown_scheme(url: str) -> str:
    """Which schemes are allowed, if `url` has none of them; "" if it has one."""
    if not is_foreign(url):
        return "" if "://" in url else _allowed()
    return "" if _entry_points(url) else _allowed()


def may_hold_password(url: str) -> bool:
    """Whether `url` has a password, or a user part whose meaning only a package knows."""
    return "@" in url if is_foreign(url) else parse(url).with_secret


def open_foreign(url: str, **options: Any) -> MetadataStore:
    """The store of the package whose scheme `url` has; `options` as of `open_async_store`.

    Raises:
        StoreUrlError: no package has the scheme, or the package cannot be used. Else what the
            package raises.
    """
    entry_point = _entry_point(url)
    try:
        opener = entry_point.load()
    except Exception as error:  # an import of foreign code may raise anything
        raise _unusable(url, entry_point, f"{type(error).__name__}: {error}") from error
    try:
        store = opener(url, **options)
    except StoreError:
        raise
    except Exception as error:  # noqa: BLE001 -- foreign code; the text may quote a password
        lacks = f": {error}" if isinstance(error, TypeError) else ""  # a parameter or a method
        raise _unusable(url, entry_point, f"{type(error).__name__}{lacks}") from None
    if not isinstance(store, MetadataStore):
        raise _unusable(url, entry_point, f"it returned {type(store).__name__}, no MetadataStore")
    return store


def _entry_points(url: str) -> "EntryPoints":
    from importlib.metadata import entry_points  # takes 10 ms, and not for Redis

    return entry_points(group=GROUP, name=url.partition("://")[0].lower())


def _entry_point(url: str) -> "EntryPoint":
    found = {entry_point.value: entry_point for entry_point in _entry_points(url)}
    if not found:
        raise StoreUrlError(f"store URL {redact(url)!r}: unknown scheme; allowed: {_allowed()}")
    if len(found) > 1:
        named = ", ".join(sorted(map(_package, found.values())))
        raise StoreUrlError(
            f"store URL {redact(url)!r}: several packages have this scheme: {named}; keep one"
        )
    return next(iter(found.values()))


def _allowed() -> str:
    from importlib.metadata import entry_points

    built_in = ", ".join(f"{scheme}://" for scheme in SCHEMES)
    names = sorted({entry_point.name for entry_point in entry_points(group=GROUP)})
    installed = ", ".join(f"{name}://" for name in names) or "none"
    return (
        f"a URL that begins with one of {built_in}; or with the scheme of an installed package "
        f"(entry points of {GROUP!r}): {installed}"
    )


def _package(entry_point: "EntryPoint") -> str:
    return entry_point.dist.name if entry_point.dist else entry_point.module


def _unusable(url: str, entry_point: "EntryPoint", why: str) -> StoreUrlError:
    return StoreUrlError(
        f"store URL {redact(url)!r}: the package {_package(entry_point)!r} cannot open it by "
        f"{entry_point.value!r}: {why}"
    )
