"""A federation's YAML: what is accepted, and how everything else is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from fl_privacy.config import Federation, ServerRoute, ShardsRoute, ShufflerRoute, schema
from fl_privacy.errors import ConfigError

ROOT = Path(__file__).parent.parent

BAD = {
    "sites: 5\nnois: 1": ("nois", "unknown key"),
    "sites: 5\ntask: {dataset: digit}": ("task.dataset", "'digit'"),
    "rounds: 5": ("sites", "missing"),
    "sites: 0": ("sites", "0"),
    "sites: -3": ("sites", "-3"),
    "sites: [{name: a}, {name: a}]": ("sites", "'a' is there twice"),
    "sites: [{name: A b}]": ("sites.0.name", "A b"),
    "sites: 5\ncohort: 6": ("cohort", "6"),
    "sites: 5\nquorum: 6": ("quorum", "6"),
    "sites: 5\nroute: {kind: shuffler, n_min: 6}": ("route.n_min", "6"),
    "sites: 5\nquorum: 2\nroute: {kind: shuffler, n_min: 3}": ("quorum", "2"),
    "sites: 5\nroute: {kind: shuffler, n_min: 0}": ("route.n_min", "0"),
    "sites: 5\nroute: {kind: pigeon}": ("route", "pigeon"),
    "sites: 5\nroute: {kind: shards, aggregators: 1}": ("route.aggregators", "1"),
    "sites: 5\nroute: {kind: server}\nrounds_per_message: 2": ("rounds_per_message", "2"),
    "sites: 5\ntask: {dataset: heart-disease, model: lenet5}": ("task.model", "lenet5"),
    "sites: 5\ntask: {model: cnn, hidden: [10]}": ("task.hidden", "cnn"),
    "sites: 5\ntask: {dataset: heart-disease, partition: {kind: by-site}}": ("sites", "4"),
    "sites: 5\ntask: {partition: {kind: by-site}}": ("task.partition.kind", "digits"),
    "sites: [{name: a, device: gpu}]\nroute: {kind: server}": ("sites.0.device", "gpu"),
    "sites: [{name: a, epsilon: 0}]\nroute: {kind: server}": ("sites.0.epsilon", "0"),
    "sites: [{name: a, epsilon: .nan}]\nroute: {kind: server}": ("sites.0.epsilon", "nan"),
    "sites: [{name: a, epsilon: 2}]\nroute: {kind: server}": ("sites.epsilon", "no noise is added"),
    "sites: {count: 5, epsilon: [1, 2]}": ("sites.epsilon", "privatise"),
    "sites: 5\ndeadline: 0": ("deadline", "0"),
    "sites: 5\nseed: -1": ("seed", "-1"),
    "sites: 5\ncombine: {kind: fedprox, mu: -1}": ("combine.mu", "-1"),
    "- a list": ("config", "list"),
    "a: [": ("config", "not YAML"),
    "": ("config", "NoneType"),
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_config_is_one_line_with_field_and_value(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Federation.parse(text)
    field, value = BAD[text]
    assert field in str(error.value)
    assert value in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("opening", ["[", "- ", "{a: "])
def test_a_config_of_too_many_levels_is_refused(opening: str) -> None:
    with pytest.raises(ConfigError, match="more than 50 levels"):
        Federation.parse(opening * 100_000)


def test_a_config_that_aliases_make_endless_is_refused() -> None:
    lists = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    with pytest.raises(ConfigError, match="more than 1,000,000 values"):
        Federation.parse("\n".join(["a0: &a0 [x]", *lists]))
    with pytest.raises(ConfigError, match="'a' contains itself"):
        Federation.parse("sites: 3\ntask: {options: &a [*a]}")
    aliased = Federation.parse("sites: 3\ntask: {options: &none {}, partition: *none}")
    assert aliased.task.partition == Federation.parse("sites: 3").task.partition


@pytest.mark.parametrize(("written", "shown"), [("0", "0"), ("100001", "100001"), ("often", "'often'"), ("1.5", "1.5")])
def test_rounds_per_message_is_refused_in_plain_words(written: str, shown: str) -> None:
    with pytest.raises(ConfigError) as error:
        Federation.parse(f"sites: 5\nrounds_per_message: {written}")
    reason = f"rounds_per_message: {shown} was given: use auto or a number from 1 to 100000"
    assert str(error.value) == f"config: {reason}"


WORDS = {
    "sites: 5\nroute: {kind: shufler}": "route.kind: 'shufler' was given: unknown; use one of .*did you mean shuffler?",
    "sites: 5\nroute: shuffler": "route: 'shuffler' was given: write {kind: NAME}, with one of server, ",
    "sites: [st-mary, charite]": "sites.0: 'st-mary' was given: use keys and values, such as {name: ...}",
    "sites: five": "sites: 'five' was given: needs a count, a list of sites",
    "sites: []": "sites: [] was given: needs a count",
    "sites: [{name: St Mary}]": "'St Mary' was given: use at most 63 lower-case letters, digits and hyphens",
    "sites: 5\nhosts: {superlink: here}": "hosts.superlink: 'here' was given: use host:port",
    "sites: 5\nrounds: many": "rounds: 'many' was given: use a whole number",
    "sites: 5\ntask: {partition: {kind: idd}}": "use iid, dirichlet, coupled, by-site or auto; did you mean iid?",
    "sites: 5\nround: 3": "round: unknown key; did you mean rounds?",
    "sites: 5\ntask: {modle: mlp}": "task.modle: unknown key; did you mean model?",
    "sites: 5\ntask: {dataset: csv, options: {features: age, label: {name: y, levels: [0, 1]}}}": (
        "config: task.options: features: 'age' was given: use a list"
    ),
    "sites: 5\ntask: {dataset: csv, options: {features: [age], label: y}}": (
        "config: task.options: label: 'y' was given: use keys and values, such as {name: ...}"
    ),
}


@pytest.mark.parametrize("text", WORDS)
def test_an_error_is_in_words_of_the_config_and_not_of_python(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Federation.parse(text)
    first, _, last = WORDS[text].partition(".*")
    assert first in str(error.value)
    assert last in str(error.value)
    for foreign in ("input", "dictionary", "instance", "tuple", "pattern", "tag", "parse"):
        assert foreign not in str(error.value)


def test_many_problems_of_one_kind_do_not_flood_the_line() -> None:
    with pytest.raises(ConfigError, match=r"and 192 more$"):
        Federation.parse("sites: {count: 200, epsilon: lots}")


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"rounds.*deadline"):
        Federation.parse("sites: 5\nrounds: 0\ndeadline: -1")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        Federation.load(tmp_path / "nowhere.yaml")
    (tmp_path / "clinics.yaml").touch()
    with pytest.raises(ConfigError, match=r"clincs\.yaml: cannot be read .*; did you mean clinics\.yaml\?"):
        Federation.load(tmp_path / "clincs.yaml")


def test_defaults_are_all_sites_and_the_shuffler() -> None:
    federation = Federation.parse("sites: 4")
    assert federation.site_names == ("site-0", "site-1", "site-2", "site-3")
    assert (federation.cohort, federation.quorum, federation.floor) == (4, 4, 3)
    assert isinstance(federation.route, ShufflerRoute)


@pytest.mark.parametrize(
    ("kind", "model"), [("server", ServerRoute), ("shuffler", ShufflerRoute), ("shards", ShardsRoute)]
)
def test_the_route_is_chosen_by_its_kind(kind: str, model: type) -> None:
    assert isinstance(Federation.parse(f"sites: 5\nroute: {{kind: {kind}}}").route, model)


@settings(deadline=None)
@given(sites=st.integers(3, 40), data=st.data())
def test_a_written_config_reads_back_the_same(sites: int, data: st.DataObject) -> None:
    cohort = data.draw(st.integers(3, sites))
    quorum = data.draw(st.integers(3, cohort))
    text = f"sites: {sites}\ncohort: {cohort}\nquorum: {quorum}\nroute: {{kind: shuffler, n_min: 3}}"
    federation = Federation.parse(text)
    again = Federation.parse(federation.to_yaml())
    assert again == federation
    assert again.digest == federation.digest


def test_the_digest_covers_what_parties_share_and_not_where_a_site_keeps_its_data() -> None:
    base = Federation.parse("sites: [{name: a}, {name: b}, {name: c}]")
    moved = Federation.parse("sites: [{name: a, data: elsewhere, device: cuda}, {name: b}, {name: c}]")
    changed = Federation.parse("sites: [{name: a}, {name: b}, {name: c}]\nrounds: 6")
    assert base.digest == moved.digest
    assert base.digest != changed.digest


def test_the_reference_in_the_docs_matches_the_code() -> None:
    source = importlib.util.spec_from_file_location("schema_script", ROOT / "scripts" / "schema.py")
    assert source is not None
    assert source.loader is not None
    script = importlib.util.module_from_spec(source)
    source.loader.exec_module(script)
    assert json.loads((ROOT / "docs" / "config.schema.json").read_text()) == schema(), "run: make schema"
    assert (ROOT / "docs" / "config.md").read_text() == script.page(), "run: make schema"


# Files with cells are matrices of federations, which tests/test_audit.py covers.
FEDERATIONS = [path for path in sorted((ROOT / "configs").rglob("*.yaml")) if "\ncells:" not in path.read_text()]


@pytest.mark.parametrize("path", FEDERATIONS, ids=lambda p: p.stem)
def test_every_shipped_config_is_valid(path: Path) -> None:
    assert Federation.load(path).sites


def test_with_a_data_folder_a_config_may_say_something_else(tmp_path: Path) -> None:
    """Only where it is read with one: all parties of a run then get the same config, whatever folders they have."""
    path = ROOT / "configs" / "eris.yaml"
    plain, given = Federation.load(path), Federation.load(path, tmp_path)
    assert (plain.task.dataset, plain.task.model) == ("digits", "mlp")
    assert (given.task.dataset, given.task.model) == ("mnist", "lenet5")
    assert (given.route, given.compress, given.rounds) == (plain.route, plain.compress, plain.rounds)
    assert given.task.train.batch_size == plain.task.train.batch_size
    assert plain.digest == Federation.parse(plain.to_yaml()).digest != given.digest
    assert given.digest == Federation.parse(given.to_yaml()).digest
    file = tmp_path / "c.yaml"
    file.write_text("sites: 3\nwith_data: {rounds: none}\n")
    assert Federation.load(file).rounds == 5
    with pytest.raises(ConfigError, match=r"rounds: .*whole number"):
        Federation.load(file, tmp_path)
    file.write_text("sites: 3\nwith_data: 3\n")
    with pytest.raises(ConfigError, match="with_data"):
        Federation.load(file, tmp_path)
