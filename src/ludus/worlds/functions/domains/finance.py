"""Finance: accounts, payments, stocks and invoices."""

from __future__ import annotations

from ludus.worlds.functions.domains.catalogue import Function, Gift, Param
from ludus.worlds.functions.domains.kinds import DATES
from ludus.worlds.functions.domains.state import DomainState, Row


def _balance(state: DomainState, account: str) -> float:
    found = state.row("account", account).setdefault("balance", state.number(400, 900, "balance", account))
    assert isinstance(found, int | float)
    return found


def get_balance(state: DomainState, account: str) -> Row:
    """The balance of an account."""
    return {"balance": _balance(state, account)}


def transfer_money(state: DomainState, amount: float, source: str, target: str) -> Row:
    """Move money between accounts."""
    left = _balance(state, source) - amount
    if left < 0:
        raise ValueError(f"{source} holds less than {amount:g}")
    state.row("account", source)["balance"] = left
    state.row("account", target)["balance"] = _balance(state, target) + amount
    transfer_id = state.issue("transfer", amount, source, target)
    state.need("transfer", transfer_id)["amount"] = amount
    return {"transfer_id": transfer_id}


def pay_person(state: DomainState, amount: float, person: str) -> Row:
    """Pay a person."""
    transfer_id = state.issue("transfer", amount, person)
    state.need("transfer", transfer_id)["amount"] = amount
    return {"transfer_id": transfer_id}


def get_transfer(state: DomainState, transfer_id: str) -> Row:
    """Amount and date of a transfer."""
    row = state.need("transfer", transfer_id)
    amount = row.setdefault("amount", state.number(15, 99, transfer_id))
    return {"amount": amount, "date": state.pick(DATES, transfer_id)}


def get_stock_price(state: DomainState, ticker: str) -> Row:
    """The price of a stock."""
    return {"price": state.number(10, 350, "stock", ticker)}


def buy_stock(state: DomainState, shares: int, ticker: str) -> Row:
    """Buy shares of a stock."""
    order_id = state.issue("order", ticker, shares)
    state.need("order", order_id)["cost"] = shares * state.number(10, 350, "stock", ticker)
    return {"order_id": order_id}


def cancel_order(state: DomainState, order_id: str) -> Row:
    """Cancel an order of shares."""
    cost = state.drop("order", order_id).get("cost")
    return {"refund": state.number(20, 90, order_id) if cost is None else cost}


def convert_currency(state: DomainState, amount: float, currency: str) -> Row:
    """Convert euros."""
    return {"amount": round(amount * state.number(3, 18, "rate", currency) / 2, 2)}


def create_invoice(state: DomainState, customer: str, amount: float) -> Row:
    """Write an invoice."""
    invoice_id = state.issue("invoice", customer, amount)
    state.need("invoice", invoice_id).update(customer=customer, amount=amount)
    return {"invoice_id": invoice_id}


def send_invoice(state: DomainState, invoice_id: str, email: str) -> Row:
    """Send an invoice."""
    state.need("invoice", invoice_id)["sent"] = email
    return {"sent": email}


_AMOUNT = Param("amount", "amount")
_PAID = (Gift("transfer_id", "transfer"),)

FUNCTIONS = (
    Function(
        "get_balance",
        "finance",
        ("get the balance", "check the balance"),
        (Param("account", "account", "of my {} account"),),
        get_balance,
        (Gift("balance", "amount"),),
    ),
    Function(
        "transfer_money",
        "finance",
        ("transfer", "move"),
        (_AMOUNT, Param("source", "account", "from my {} account"), Param("target", "account", "to my {} account")),
        transfer_money,
        _PAID,
    ),
    Function("pay_person", "finance", ("pay",), (_AMOUNT, Param("person", "person", "to {}")), pay_person, _PAID),
    Function(
        "get_transfer",
        "finance",
        ("look up", "check"),
        (Param("transfer_id", "transfer"),),
        get_transfer,
        (Gift("amount", "amount"), Gift("date", "date")),
    ),
    Function(
        "get_stock_price",
        "finance",
        ("get the stock price", "look up the price"),
        (Param("ticker", "ticker", "of {}"),),
        get_stock_price,
        (Gift("price", "amount"),),
    ),
    Function(
        "buy_stock",
        "finance",
        ("place an order",),
        (Param("shares", "count", "for {} shares"), Param("ticker", "ticker", "of {}")),
        buy_stock,
        (Gift("order_id", "order"),),
    ),
    Function(
        "cancel_order",
        "finance",
        ("cancel", "withdraw"),
        (Param("order_id", "order"),),
        cancel_order,
        (Gift("refund", "amount"),),
    ),
    Function(
        "convert_currency",
        "finance",
        ("convert",),
        (_AMOUNT, Param("currency", "currency", "into {}")),
        convert_currency,
        (Gift("amount", "amount"),),
    ),
    Function(
        "create_invoice",
        "finance",
        ("write an invoice", "create an invoice"),
        (Param("customer", "person", "for {}"), Param("amount", "amount", "over {}")),
        create_invoice,
        (Gift("invoice_id", "invoice"),),
    ),
    Function(
        "send_invoice",
        "finance",
        ("send",),
        (Param("invoice_id", "invoice"), Param("email", "email", "to {}")),
        send_invoice,
    ),
)
