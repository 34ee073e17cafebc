"""Run names that a person can remember, say and type, such as ``brisk-otter-17``."""

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # commands that list runs draw no names and need no Seed
    from fedlearn.core.randomness import Seed

_ADJECTIVES = (  # noqa: SIM905 (as prose it fits a screen)
    "able amber brave breezy bright brisk bronze calm candid clear clever cosy crisp curious "
    "daring deft eager early easy fair fleet fond frank fresh gentle giddy glad golden grand "
    "green happy hardy honest humble jolly keen kind lively loyal lucky mellow merry mighty "
    "mild modest neat noble patient plucky polite proud quick quiet rapid ready rosy silver "
    "smart steady sunny swift tidy vivid warm wise witty"
).split()
_ANIMALS = (  # noqa: SIM905 (as prose it fits a screen)
    "badger beaver bison bobcat camel caribou cheetah cicada condor crane cricket dingo "
    "dolphin eagle egret falcon ferret finch fox gannet gecko gibbon gopher heron hippo ibex "
    "iguana impala jackal jaguar kestrel kiwi koala lark lemur lizard llama lobster lynx "
    "magpie marmot marten moose newt ocelot octopus oriole osprey otter owl panda pelican "
    "penguin pigeon puffin puma quail rabbit raven robin salmon seal sparrow squirrel "
    "starling stork swan tapir toucan turtle walrus weasel wombat wren yak zebra"
).split()
_NUMBERS = range(10, 100)


def memorable_names(seed: "Seed") -> Iterator[str]:
    """Yield an endless sequence of names, determined by the seed; some 450,000 are distinct."""
    for attempt in count():
        value = seed.derive("run name", attempt).value
        value, adjective = divmod(value, len(_ADJECTIVES))
        value, animal = divmod(value, len(_ANIMALS))
        number = _NUMBERS[value % len(_NUMBERS)]
        yield f"{_ADJECTIVES[adjective]}-{_ANIMALS[animal]}-{number}"
