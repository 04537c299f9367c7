"""Pseudonyms of names: what they depend on."""

from __future__ import annotations

from slurm_affinode.core.pseudonyms import pseudonym

KEY = b"0123456789abcdef"


def test_pseudonym_is_stable() -> None:
    """A later release gives the names of earlier reports and traces."""
    assert pseudonym(KEY, "u", "ann") == "u873b86b3a971"


def test_pseudonym_depends_on_key_kind_and_names() -> None:
    """Names are not concatenated: other names with the same letters have another pseudonym. Any text is a name."""
    names = [
        pseudonym(KEY, "u", "a", "bc"),
        pseudonym(KEY, "u", "ab", "c"),
        pseudonym(KEY, "a", "a", "bc"),
        pseudonym(KEY[::-1], "u", "a", "bc"),
        pseudonym(KEY, "u", "\udcff"),
    ]
    assert len({name[1:] for name in names}) == len(names)
    assert {len(name) for name in names} == {13}
