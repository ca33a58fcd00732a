"""Answers without a call: (case, text) for questions, texts for refusals. The cases are in the test."""

ASKS_RIGHT = [
    *(
        ("event date", text)
        for text in (
            "What is the date?",
            "On which date?",
            "Which day?",
            "When is it?",
            "On what day should I put it?",
            "Sure. Which date would you like?",
            "Happy to help! Could you tell me the date?",
            "Which date shall I use for the event?",
            "Please tell me the date.",
            "Please provide the date of the event.",
            "I need the date.",
            "For which day is the dentist at 10:00?",
            "On which date at 10:00?",
            "Could you specify the day, please?",
            "WHAT DATE?",
            "What\u2019s the date?",
            "Which date\uff1f",
            "what date and which month?",
            "I can add that. When should it happen?",
            "Let me know: which date?",
            "At 10:00 on which day?",
        )
    ),
    *(
        ("event time", text)
        for text in (
            "At what time?",
            "What time?",
            "When does it begin?",
            "At which hour should it start?",
            "Which time of day on March 3?",
            "Could you give me the time?",
            "What time on March 3 is the dentist?",
            "Please specify the time.",
        )
    ),
    *(
        ("event title", text)
        for text in (
            "What is the title?",
            "What shall I call it?",
            "What is the event called?",
            "Under which name?",
            "Which title should the event on March 3 have?",
            "What should I call the entry at 10:00?",
            "What is it about?",
            "What should I put as the heading?",
        )
    ),
    *(
        ("message text", text)
        for text in (
            "What should the message say?",
            "What would you like me to write?",
            "What should I tell them?",
            "What is the text?",
            "Which words should I send?",
            "What do you want to say?",
            "Please tell me the text of the message.",
            "And the content?",
        )
    ),
    *(
        ("hotel nights", text)
        for text in (
            "How many nights?",
            "For how long?",
            "How long will you stay?",
            "How many nights do you need?",
            "What is the number of nights?",
            "For how many nights shall I book hotel H12?",
        )
    ),
    *(
        ("transfer amount", text)
        for text in (
            "How much?",
            "What amount?",
            "How much money shall I transfer?",
            "Which sum?",
            "How many euros?",
            "How much should go from checking to savings?",
            "Please state the amount.",
        )
    ),
    *(
        ("lamp room", text)
        for text in (
            "Which room?",
            "In which room is the lamp?",
            "Where is it?",
            "Where should I turn the lamp on?",
            "What is the name of the room?",
            "The lamp of which room?",
        )
    ),
]
"""Questions for what is missing."""

ASKS_WRONG = [
    *(
        ("event date", text)
        for text in (
            "",
            " ",
            "?",
            "\u200b?",
            "date",
            "The date.",
            "Which?",
            "What?",
            "What do you mean?",
            "Anything else?",
            "Is that all?",
            "Shall I go on?",
            "Which name, when, many?",
            "Who, what, when, where, how many?",
            "What is the date, time, city, title, name, person, room, amount, text, label and file?",
            "When and where, and who is coming?",
            "Which date and which room?",
            "Which date, which city?",
            "What day, what amount, what language?",
            "Which date and what title?",
            "What is the time?",
            "Which name?",
            "Where?",
            "How many?",
            "Done! Which date?",
            "I have added it. Which date?",
            "I booked it. Was the date right?",
            "The date is missing. Shall I go on?",
            "I don't know the date.",
            "date? name? many?",
            "When? Where? Who? How much?",
            "Put dentist on my calendar at 10:00. Which date?",
            "March 3?",
            "D\u200bone. Shall I go on?",
            "No tool fits.",
        )
    ),
    *(
        ("event time", text)
        for text in (
            "Which date?",
            "What time and which title?",
            "Which date and what time?",
            "What time, and how many people, where?",
            "Time?: Done.".replace("?", ""),
            "Who?",
        )
    ),
    *(
        ("message text", text)
        for text in (
            "Which message id?".replace("message id", "number"),
            "When?",
            "Who is it for?",
            "I have sent it. What should it say?",
            "Sent! What was the text?",
            "What text, which date, how many minutes?",
            "What name and what amount?",
            "Where?",
        )
    ),
    *(
        ("hotel nights", text)
        for text in (
            "How?",
            "How much does it cost?",
            "Which hotel?",
            "How many nights, which city, and who?",
            "When?",
            "Which name?",
            "How many nights and in which room?",
        )
    ),
    *(
        ("transfer amount", text)
        for text in (
            "From which account?",
            "To which account?",
            "How much, and from which account?",
            "How long?",
            "How much, when and where?",
            "I transferred it. How much was it?",
            "Which currency?",
            "How many nights?",
        )
    ),
    *(
        ("lamp room", text)
        for text in (
            "Which device?",
            "Which room and which device?",
            "Which city?",
            "Which name?",
            "Where, when and who?",
            "Which room, and on which date?",
            "The room is missing.",
            "I switched it on. Which room is it in?",
            "How warm?",
            "Which door?",
            "What is the title of the room and the date?",
        )
    ),
]
"""Questions for something else, for too much, or none."""

REFUSALS_RIGHT = [
    "No tool fits.",
    "No.",
    "None of these functions can do that.",
    "Sorry, I cannot do this with the tools I have.",
    "I can't do that.",
    "I can\u2019t do that.",
    "I cannot help with that.",
    "I am not able to do this.",
    "I'm unable to do that with these functions.",
    "That is not possible.",
    "That isn't possible here.",
    "There is no tool for this.",
    "There's no function that books flights.",
    "I have no tool for that.",
    "I don't have a function for that.",
    "I do not have access to your calendar.",
    "None of the available tools fits.",
    "Nothing here fits the request.",
    "No suitable function is available.",
    "No function on offer does that.",
    "This is beyond my tools.",
    "This is outside what I can do.",
    "Unfortunately, I can't book flights.",
    "I'm sorry, but that is not supported.",
    "I am afraid I cannot send messages.",
    "I'm afraid not.",
    "The tools on offer do not cover this.",
    "These functions don't let me transfer money.",
    "My functions can only read the weather, not book hotels.",
    "I looked through the tools, and none fits.",
    "I checked the functions; none of them can do that.",
    "I was not given a tool that can do it.",
    "I lack a tool for this.",
    "A tool for this is missing.",
    "It cannot be done.",
    "It can't be done with these tools.",
    "I haven't booked it, as no tool fits.",
    "Nothing was booked: there is no tool for it.",
    "That request is unsupported.",
    "Impossible.",
    "I must decline: no function fits.",
    "I won't be able to do that.",
    "NO TOOL FITS",
    "no tool fits",
    "There is not a single tool that could do this.",
    "With these tools I could not find a way to do it.",
    "I am not equipped for this.",
    "Booking is not among my functions.",
    "Neither of these tools can do that.",
    "I can't complete this request.",
]
"""Texts that say that it cannot be done."""

REFUSALS_WRONG = [
    "",
    " ",
    "\n\t",
    "\u200b",
    "\u200b\u200c\u200d",
    "\ufeff",
    "\u2060",
    "\u0301",
    "\u0301\u0302",
    "\u00ad",
    "\u3164",
    "\u2800",
    "\U000e0041",
    ".",
    "...",
    "?!",
    "-",
    "\U0001f44d",
    "\U0001f600\U0001f600",
    "\u2705",
    "Done.",
    "Done!",
    "OK.",
    "Yes.",
    "Sure.",
    "All set.",
    "Success.",
    "passed",
    "Done! I booked it.",
    "I have cancelled the booking, sorry for the trouble.",
    "I have cancelled it. Sorry, no refund is possible.",
    "I booked it, no problem.",
    "No problem!",
    "No problem, it is booked.",
    "Not a problem.",
    "No worries.",
    "I've sent the message. I can't say when it arrives.",
    "Your flight has been booked. There is no refund.",
    "The order was cancelled; nothing else is possible.",
    "It's done, though no tool fits.",
    "No tool fits, but I booked it anyway.",
    "I could not find a tool, so I transferred it myself.",
    "Booked! No function was missing.",
    "Sorry for the delay, your table is reserved.",
    "I went ahead and set it, no tool needed.",
    "We have now paid the invoice. Not possible to undo.",
    "The reminder is set.",
    "Successfully sent. No error here.",
    "Everything is taken care of, nothing is missing here.",
    "What is the date?",
    "Which name?",
    "The temperature is 20 degrees.",
    "Rome",
    "42",
    "tool",
    "I will do it.",
    "Please wait.",
    "Hello!",
]
"""Texts that do not say so, that nobody sees, or that claim that it was done."""
