from dataclasses import dataclass, field

from hetu_fx.base.once import once, once_per_object


@dataclass(frozen=True)
class Adder:
    asked: list[int] = field(default_factory=list)

    @once
    def plus(self, number: int, more: int = 0) -> int:
        self.asked.append(number)
        return number + more


@dataclass(frozen=True, slots=True)
class Slot:
    adder: Adder
    number: int

    @once_per_object(lambda slot: (slot.adder, (slot.number,)))
    def twice(self) -> int:
        return 2 * self.adder.plus(self.number)


def test_each_answer_is_worked_out_once_for_each_object() -> None:
    one, other = Adder(), Adder()
    assert [one.plus(1), one.plus(1), one.plus(1, 2), one.plus(1, more=3), other.plus(1)] == [1, 1, 3, 4, 1]
    assert (one.asked, other.asked) == ([1, 1, 1], [1])


def test_objects_that_come_and_go_share_answers_through_what_they_are_of() -> None:
    adder = Adder()
    assert [Slot(adder, number).twice() for number in (1, 2, 1, 2)] == [2, 4, 2, 4]
    assert adder.asked == [1, 2]
