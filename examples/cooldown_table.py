"""Each cooldown in a row is longer than the last. On the virtual loop of headgate.testing, waiting takes no time."""

import headgate
from headgate.resources import CooldownResource, Pool, Resource
from headgate.testing import run

pool = Pool(
    resources=[Resource(resource_id="key-1", value="sk-aaa")],
    cooldown_table=(10.0, 30.0, 60.0, 120.0),
)


answers = [429, 429, 429, 429, 429, 200, 429, 200]


async def ask(resource):
    status = answers.pop(0)
    if status == 429:
        raise CooldownResource(reason="429 without Retry-After")
    return status


def tell(event):
    if event.name == "resource_cooled":
        print(f"{event.resource_id} cools down for {event.seconds:.0f} s, {event.consecutive} in a row")


async def main():
    headgate.subscribe(tell, "resources.health")
    while answers:
        print(await pool.run(ask, max_attempts=6, wait_for_cooldown=True))


run(main())
