"""What optim.name means, whatever the framework: a rule of hvdtrain/optim, and its momentum."""

from __future__ import annotations

from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.optim.rule import Rule


def build_rule(config: Config) -> Rule:
    """The rule, with the options of `optim`. Raises UserError for a class of torch.optim, which is not a rule."""
    name, where = config.optim.name, config.where("optim.name")
    if plugins.is_dotted(name):
        what = f"{name} is a torch optimizer, framework={config.framework} needs a rule"
        raise UserError(what, where, "framework=torch, or a name of `list`")
    build = plugins.load("optim", name, where).build
    rule: Rule = build(**plugins.convert_options(config.optim, "optim"))
    return rule


def momentum(config: Config) -> float:
    """optim.momentum, or where it is not set the rule's own; 0 for a class of torch.optim, whose constructor has its own default."""
    if config.optim.momentum is not None or plugins.is_dotted(config.optim.name):
        return config.optim.momentum or 0.0
    return build_rule(config).momentum
