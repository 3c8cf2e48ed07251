"""The hint to install an extra is given for its own packages alone."""

import pytest

from residua.errors import extra


@pytest.mark.parametrize(("name", "package"), [("lab", "yaml"), ("eval", "lm_eval"), ("eval", "transformers")])
def test_a_package_of_the_extra_is_named_with_the_command_that_installs_it(name, package):
    message = rf"^{package} is not installed; it comes with: pip install 'residua\[{name}\]'$"
    with pytest.raises(ModuleNotFoundError, match=message), extra(name):
        raise ModuleNotFoundError(f"No module named '{package}'", name=package)


@pytest.mark.parametrize("package", ["regex", "transformers.cache_utils", "residua.absent", None])
def test_an_error_inside_an_installed_package_comes_through(package):
    """What a package of the extra misses itself is not the extra's, nor is a part that another version of it has."""
    error = ModuleNotFoundError(f"No module named {package!r}", name=package)
    with pytest.raises(ModuleNotFoundError) as caught, extra("lab"):
        raise error
    assert caught.value is error
