"""A federation's initial model: from its seed, or from a file that all parties agree on."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fl_privacy import vector
from fl_privacy.config import Federation
from fl_privacy.deploy.engines import compose
from fl_privacy.errors import ConfigError, FederationError
from fl_privacy.models import formats
from fl_privacy.models.initial import check, differences, initial
from fl_privacy.tasks.workload import layout_of, model_of

CONFIG = "sites: 3\nrounds: 2\nseed: 5\n"


def trained(federation: Federation) -> nn.Module:
    """The federation's model with other weights."""
    model = model_of(federation)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn_like(tensor))
    return model


def config(folder: Path, init: str | None = None) -> Federation:
    path = folder / "federation.yaml"
    path.write_text(CONFIG + (f"init: {init}\n" if init else ""))
    return Federation.load(path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_a_federation_starts_from_the_file_beside_its_config(tmp_path: Path, name: str) -> None:
    plain = config(tmp_path)
    model = trained(plain)
    formats.write(tmp_path / name, model, None, "{}")
    pinned = config(tmp_path, name)
    np.testing.assert_array_equal(initial(pinned), vector.flatten(model)[0])
    np.testing.assert_array_equal(initial(plain), vector.flatten(model_of(plain))[0])
    assert plain.starting_from(tmp_path / name).digest == pinned.digest != plain.digest


def test_the_digest_is_of_the_file_and_not_of_its_place(tmp_path: Path) -> None:
    formats.write(tmp_path / "a.pt", trained(config(tmp_path)), None, "{}")
    pinned = config(tmp_path, "a.pt")
    (tmp_path / "there").mkdir()
    assert pinned.init is not None
    moved = pinned.model_copy(update={"init": pinned.init.placed(tmp_path / "there", "init")})
    assert moved.digest == pinned.digest
    assert Federation.parse(moved.to_yaml()).digest == pinned.digest
    (tmp_path / "a.pt").unlink()
    np.testing.assert_array_equal(initial(moved).shape, initial(config(tmp_path)).shape)


def test_a_party_without_the_file_reads_the_config_and_has_the_same_digest(tmp_path: Path) -> None:
    formats.write(tmp_path / "a.pt", trained(config(tmp_path)), None, "{}")
    pinned = config(tmp_path, "a.pt")
    text = pinned.to_yaml()
    (tmp_path / "a.pt").unlink()
    assert Federation.parse(text).digest == pinned.digest
    with pytest.raises(ConfigError, match=r"^init: .*a.pt cannot be read"):
        initial(Federation.parse(text))


def test_a_file_that_changed_since_it_was_pinned_is_refused(tmp_path: Path) -> None:
    formats.write(tmp_path / "a.pt", trained(config(tmp_path)), None, "{}")
    pinned = config(tmp_path, "a.pt")
    formats.write(tmp_path / "a.pt", trained(pinned), None, "{}")
    with pytest.raises(ConfigError, match=r"^init: .*but the federation agreed on"):
        initial(pinned)


def other_layout(federation: Federation) -> dict[str, torch.Tensor]:
    state = dict(trained(federation).state_dict())
    state["fc1.weight"] = torch.zeros(7, 64)
    del state["out.bias"]
    return {**state, "extra": torch.zeros(2)}


def test_another_layout_is_refused_with_what_differs(tmp_path: Path) -> None:
    save_file(other_layout(config(tmp_path)), tmp_path / "a.safetensors")
    said = "fc1.weight is (7, 64), not (64, 64); out.bias (10,) is missing; extra (2,) is not in the model"
    with pytest.raises(ConfigError) as error:
        check(config(tmp_path, "a.safetensors"))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_the_order_of_tensors_and_integer_buffers_do_not_matter(tmp_path: Path) -> None:
    federation = config(tmp_path)
    model = trained(federation)
    state: dict[str, Any] = dict(reversed(model.state_dict().items()))
    torch.save({**state, "norm.num_batches_tracked": torch.tensor(3)}, tmp_path / "a.pt")
    np.testing.assert_array_equal(initial(config(tmp_path, "a.pt")), vector.flatten(model)[0])


def test_many_differences_are_counted() -> None:
    wanted = vector.flatten({f"t{i}": torch.zeros(i) for i in range(9)})[1]
    assert len(differences(wanted, vector.Layout(()))) == 9
    assert differences(wanted, wanted) == []


class Touch:
    """What a pickle may do when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("content", [b"", b"not a model", b"PK\x03\x04 broken"])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".bin"])
def test_a_file_that_is_no_model_is_one_line(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    with pytest.raises(FederationError) as error:
        initial(config(tmp_path, path.name))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_with_code_is_refused_and_not_executed(tmp_path: Path) -> None:
    torch.save({"weight": Touch(tmp_path / "executed")}, tmp_path / "a.pt")
    with pytest.raises(FederationError, match=r"not a \.pt file of tensors"):
        initial(config(tmp_path, "a.pt"))
    assert not (tmp_path / "executed").exists()
    torch.save([torch.zeros(2)], tmp_path / "b.pt")
    with pytest.raises(FederationError, match=r"save model\.state_dict"):
        initial(config(tmp_path, "b.pt"))


def test_a_file_takes_no_more_memory_than_it_has_bytes(tmp_path: Path) -> None:
    """A tensor may claim any shape by a stride of 0, and a compressed archive unpacks to any size."""
    state = dict(trained(config(tmp_path)).state_dict())
    torch.save({**state, "out.bias": torch.zeros(1).expand(2**50)}, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match=r"out\.bias is \(1125899906842624,\), not \(10,\)"):
        initial(config(tmp_path, "a.pt"))
    torch.save({**state, "out.bias": torch.zeros(10)}, tmp_path / "b.pt")
    with zipfile.ZipFile(tmp_path / "b.pt") as plain, zipfile.ZipFile(tmp_path / "c.pt", "w", 8) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    initial(config(tmp_path, "b.pt"))
    with pytest.raises(FederationError, match=r"not a \.pt file of tensors \(it is compressed"):
        initial(config(tmp_path, "c.pt"))


@pytest.mark.parametrize("tensor", [torch.zeros(10).to_sparse(), torch.zeros(10, device="meta")])
def test_a_tensor_without_numbers_of_its_own_is_refused(tmp_path: Path, tensor: torch.Tensor) -> None:
    torch.save({**trained(config(tmp_path)).state_dict(), "out.bias": tensor}, tmp_path / "a.pt")
    with pytest.raises(FederationError, match=r"a\.pt: "):
        initial(config(tmp_path, "a.pt"))


def test_a_model_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    state = dict(trained(config(tmp_path)).state_dict())
    state["out.bias"] = torch.full((10,), torch.nan)
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match="not finite"):
        initial(config(tmp_path, "a.pt"))


@pytest.mark.parametrize(
    ("value", "said"), [("gone.pt", "cannot be read"), ("{file: a.pt, sha256: xyz}", "sha256"), ("[1]", "init")]
)
def test_a_wrong_key_is_one_line(tmp_path: Path, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        config(tmp_path, value)
    assert "\n" not in str(error.value)


def test_containers_get_the_file_at_the_same_place(tmp_path: Path) -> None:
    formats.write(tmp_path / "a.pt", trained(config(tmp_path)), None, "{}")
    located = compose.located(config(tmp_path, "a.pt"))
    services = compose.document(located, tmp_path / "federation.yaml", "image", "run")["services"]
    mounts = {name: service["volumes"] for name, service in services.items()}
    assert [name for name, found in mounts.items() if f"{tmp_path}/a.pt:{tmp_path}/a.pt:ro" in found] == ["init"]


def test_the_layout_is_unchanged_by_the_file(tmp_path: Path) -> None:
    formats.write(tmp_path / "a.pt", trained(config(tmp_path)), None, "{}")
    assert layout_of(config(tmp_path, "a.pt")) == layout_of(config(tmp_path))
