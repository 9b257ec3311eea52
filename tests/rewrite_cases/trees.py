"""The trees that micro-models run on: seven sizes, each over two levels and over three."""

from __future__ import annotations

from dataclasses import dataclass

from ikbo_tree import BroadcastTree

LEVELS = ("user", "vendor", "item")


@dataclass(frozen=True)
class Size:
    """Vendors of each user and items of each vendor, in order."""

    name: str
    vendors: tuple[int, ...]
    items: tuple[int, ...]

    def tree(self, levels: int) -> BroadcastTree:
        """User -> vendor -> item, or user -> item with the same map from items to users."""
        if levels == 3:
            return BroadcastTree.from_counts(
                {"vendor": self.vendors, "item": self.items}, root="user"
            )
        items_of_users = []
        first = 0
        for vendors in self.vendors:
            items_of_users.append(sum(self.items[first : first + vendors]))
            first += vendors
        return BroadcastTree.from_counts({"item": items_of_users}, root="user")


# Models are captured on this one: 3, 5 and 11 rows are sizes that no model has as a width.
EXAMPLE = Size("example", (2, 1, 2), (3, 0, 2, 4, 2))

SIZES = (
    Size("one_of_each", (1,), (1,)),
    EXAMPLE,
    Size("equal_sizes", (2, 0, 1, 1), (1, 2, 0, 1)),
    Size("wide", (1, 2), (17, 1, 22)),
    Size("childless", (0, 2, 0, 1, 3, 0), (2, 0, 3, 0, 0, 4)),
    Size("ratio_one", (1,) * 7, (1,) * 7),
    Size("large", (12, 1, 0, 6, 2, 1, 5, 3, 1), (120, *(k % 4 for k in range(29)), 41)),
)

# Row counts that are primes and divide no product of model widths: a size tells its level, even
# where rows and heads are merged in one dimension. The last vendor and the last user have no item.
DISTINCT = Size("distinct", (7, *(2,) * 15, 0), (*(6,) * 35, 1, 0))
