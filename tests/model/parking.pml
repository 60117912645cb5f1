/*
 * Parking: what lies in a tenant's chunks goes to the host, the chunks to whoever needs them, and it all comes back under the same
 * addresses. It is the protocol that parking is to have; nothing of it is built yet.
 *
 * Two tenants, each with contents for all chunks of the pool, so that one of them is parked, or for one each (NEEDS=1); the ledger's
 * writer, which speaks for a server that needs a chunk now and then. A tenant is a thread that launches, which is held while
 * something is missing, and its control thread. The ledger is one word a chunk, and the table of host copies one word a slot, which
 * tenants take and leave themselves. A chunk is released by mail, and the writer makes it free before it counts the mail as read;
 * the epoch by which a mail is known to be of an earlier ownership is a bit here.
 *
 * Left out: how a closed gate keeps everybody out (gate.pml), micro-batches and their arena (handover.pml), clean and zero chunks,
 * which are only less work, and time: a tenant stays until it has launched once, and whoever has asked first gets first. That
 * tenants ask for so many chunks in all, and not for so many more, makes no difference where the pool has no others.
 *
 *   -DDEATH        the first tenant may be killed at any instant
 *   -DSUCCESSION   the writer may be killed at any instant, and another takes its place; KILLS times
 *   -DPATIENT      a demand stands until it is answered; needed for `served`, `runs0` and `runs1`
 *   -DBUSY         the server needs a chunk without end, and keeps it until one of the tenants that wait is owed its memory, which
 *                  each of them is in the end
 *   Each of these takes something away, and something must then be found wrong:
 *   -DNO_DONE      a chunk is released before what lies in it has been copied
 *   -DNO_SLOT      a slot is taken some time after it was seen free (with NEEDS=1)
 *   -DNO_SWEEP     what a dead tenant had of the table stays its (with DEATH)
 *   -DNO_ALL       the gate opens when a part is back
 *   -DNO_WHOLE     a part of what a tenant asks for is granted
 *   -DNO_YIELD     whoever waits for the rest keeps what it still has
 *   -DNO_LOOK      a held thread asks to be woken only if something was missing as it came
 *   -DNO_STAY      a tenant may be parked again before it has launched
 *   -DNO_TURN      a busy server gives nothing back (with BUSY)
 *   -DNO_KEEP      what is free is the busy server's although it is owed (with BUSY and NEEDS=1)
 */
#define TENANTS 2
#define CHUNKS 2       /* of the pool */
#ifndef NEEDS
#define NEEDS 2        /* chunks of each tenant */
#endif
#define SLOTS (2 * NEEDS)   /* of the table: with fewer a tenant may have to wait for the other one for good */
#ifndef SERVES
#define SERVES 1       /* how often the server needs a chunk */
#endif
#ifndef KILLS
#define KILLS 1
#endif

#define NONE 7         /* no chunk lies at that position */
#define NOTHING 6      /* there is no such position */
#define FREE 0
#define SERVING 3
#define of(t) (t + 1)                    /* as owner of a chunk, or of a slot */
#define at(t, p) (CHUNKS * t + p)        /* a tenant's position, or a chunk as the tenant sees it */
#define contents(t, p) (1 + at(t, p))    /* 0: anything */

/* The pool: who has a chunk, and what lies in it. The second tenant is parked at first. */
byte owner[CHUNKS];
byte holds[CHUNKS];
bit released[4];       /* at(tenant, chunk): the tenant has released it, and has not been granted it since */
chan mail[TENANTS] = [CHUNKS] of { byte };

/* The table of host copies, and what lies in the slots. */
byte slot_of[4] = NONE;     /* at(tenant, position) */
byte slot_owner[SLOTS];
byte slot_holds[SLOTS];

#define or_else(slot, other) (slot_owner[slot] == FREE -> slot : other)
#if NEEDS == 2
#define first_free_slot or_else(0, or_else(1, or_else(2, or_else(3, NONE))))
#else
#define first_free_slot or_else(0, or_else(1, NONE))
#endif

byte mapped[4] = NONE;      /* at(tenant, position) */
bit closed[TENANTS], inside[TENANTS];
bit wake[TENANTS];          /* somebody is held */
bit asks[TENANTS];          /* for all that it needs */
chan in_turn = [TENANTS] of { byte };
bit stays[TENANTS];         /* has come back and not launched yet */

/* What the writer demands. */
byte demand[TENANTS];       /* chunks */
bit answering[TENANTS], done[TENANTS];

bit wanted;                 /* the server needs a chunk */
byte serves = SERVES;
bit killed[TENANTS], launcher_ended[TENANTS], control_ended[TENANTS], gone[TENANTS], reclaimed[TENANTS];
bit writer_killed, writer_ended;

#define has(t, c) (owner[c] == of(t) && !released[at(t, c)])
#define is_used(t, c) (mapped[at(t, 0)] == c || mapped[at(t, 1)] == c)
#define unused(t, c) (has(t, c) && !is_used(t, c))
#define unused_of(t) (unused(t, 0) + unused(t, 1))
#define held_by(t) ((owner[0] == of(t)) + (owner[1] == of(t)))
#define resident(t, p) (mapped[at(t, p)] < CHUNKS)
#define misses(t) (mapped[at(t, 0)] == NONE || mapped[at(t, 1)] == NONE)
#define is_whole(t) (has(t, 0) + has(t, 1) == NEEDS)
#define is_right(t, p) (mapped[at(t, p)] == NOTHING || owner[mapped[at(t, p)]] == of(t) && holds[mapped[at(t, p)]] == contents(t, p))
#define free_chunks ((owner[0] == FREE) + (owner[1] == FREE))

proctype launcher(byte t) {
  {
    do
    :: atomic {
         !closed[t] ->
         inside[t] = 1;
         assert(!misses(t));
         assert(is_right(t, 0) && is_right(t, 1))
       }
       atomic { stays[t] = 0; inside[t] = 0 }
#ifdef NO_LOOK
    :: atomic { closed[t] && misses(t) -> wake[t] = 1 }; !closed[t]
    :: atomic { closed[t] && !misses(t) }; !closed[t]
#else
    :: atomic { closed[t] && !wake[t] -> wake[t] = 1 }
#endif
    od
  } unless { killed[t] };
  launcher_ended[t] = 1
}

#define release(t, c) released[at(t, c)] = 1; mail[t]!c

/* The contents of position p go to the host and its chunk to the writer. `to`, NONE: no slot is left. */
inline park(t, p) {
#ifdef NO_SLOT
  to = first_free_slot;
  atomic {
#else
  atomic {
    to = first_free_slot;
#endif
    if
    :: to != NONE ->
       slot_owner[to] = of(t);
       slot_of[at(t, p)] = to;
       from = mapped[at(t, p)]
    :: else
    fi
  };
  if
  :: to != NONE ->
#ifdef NO_DONE
     atomic { mapped[at(t, p)] = NONE; release(t, from) };
     slot_holds[to] = holds[from]
#else
     slot_holds[to] = holds[from];
     atomic { mapped[at(t, p)] = NONE; release(t, from) }
#endif
  :: else
  fi
}

/* They come back into a chunk that nothing uses yet. */
inline unpark(t, p) {
  atomic {
    to = slot_of[at(t, p)];
    from = (unused(t, 0) -> 0 : 1);
    assert(unused(t, from));
    mapped[at(t, p)] = from
  };
  holds[from] = slot_holds[to];
  atomic {
    assert(slot_owner[to] == of(t));
    slot_of[at(t, p)] = NONE;
    slot_owner[to] = FREE;
    from = NONE
  }
}

proctype control(byte t) {
  byte from = NONE, to = NONE, left;
  {
end:
    do
    :: atomic { demand[t] > 0 && !done[t] && !answering[t] -> answering[t] = 1; left = demand[t] };
       closed[t] = 1;
       !inside[t];
       do
       :: left == 0 || demand[t] == 0 -> break
       :: atomic { left > 0 && demand[t] > 0 && unused(t, 0) -> release(t, 0); left-- }
       :: atomic { left > 0 && demand[t] > 0 && !unused(t, 0) && unused(t, 1) -> release(t, 1); left-- }
       :: left > 0 && demand[t] > 0 && unused_of(t) == 0 ->
          if
          :: resident(t, 0) -> park(t, 0)
          :: !resident(t, 0) && resident(t, 1) -> park(t, 1)
          :: else -> to = NONE
          fi;
          if
          :: to == NONE -> break
          :: else -> left--
          fi
       od;
       atomic {
         /* What it gave for nothing it wants back. */
         wake[t] = wake[t] || demand[t] == 0;
         closed[t] = misses(t);
         left = 0;
         to = NONE;
         from = NONE;
         done[t] = 1;
         answering[t] = 0
       }
    :: atomic { misses(t) && wake[t] && !asks[t] -> asks[t] = 1; in_turn!t }
    :: asks[t] && is_whole(t) ->
       if
       :: mapped[at(t, 0)] == NONE -> unpark(t, 0)
       :: else
       fi;
#ifdef NO_ALL
       closed[t] = 0;
#endif
       if
       :: mapped[at(t, 1)] == NONE -> unpark(t, 1)
       :: else
       fi;
       atomic {
         asks[t] = 0;
         in_turn??eval(t);
         wake[t] = 0;
         stays[t] = 1;
         to = NONE;
         closed[t] = 0
       }
    od
  } unless { killed[t] };
  control_ended[t] = 1
}

inline take_mail(t) {
  atomic {
    mail[t]?<c>;
    owner[c] = (owner[c] == of(t) && released[at(t, c)] -> FREE : owner[c])
  };
  atomic { mail[t]?c; c = 0 }
}

/* What t, the first in turn, asks for, once all that has been released is known. */
#define more_for(t) (NEEDS - held_by(t))
inline grant(t) {
  do
  :: atomic { left > 0 && owner[0] == FREE -> owner[0] = of(t); released[at(t, 0)] = 0; left-- }
  :: atomic { left > 0 && owner[0] != FREE && owner[1] == FREE -> owner[1] = of(t); released[at(t, 1)] = 0; left-- }
  :: atomic { left == 0 || free_chunks == 0 -> left = 0; break }
  od
}

#ifdef NO_WHOLE
#define can_have(t) (free_chunks > 0 && held_by(t) < NEEDS)
#define comes_before(t) asks[t]
#else
#define can_have(t) (held_by(t) < NEEDS && free_chunks >= NEEDS - held_by(t))
#define comes_before(t) in_turn?[t]
#endif
/* One that runs is parked when it has launched; one that waits has nothing from what it still has. */
#ifdef NO_STAY
#define may_lose(t) !misses(t)
#else
#define may_lose(t) (!misses(t) && !stays[t])
#endif
#ifdef NO_YIELD
#define may_yield(t) 0
#else
#define may_yield(t) (misses(t) && held_by(t) > 0)
#endif
#define can_be_asked(t) (demand[t] == 0 && !answering[t] && !gone[t] && (may_lose(t) || may_yield(t)))

/* What the writer keeps for who is owed it, and the server gives back for that. */
#define is_serving (owner[0] == SERVING || owner[1] == SERVING)
#ifdef BUSY
#define is_owed (asks[0] || asks[1])
#else
#define is_owed 0
#endif
#ifdef NO_KEEP
#define may_serve 1
#else
#define may_serve (!(is_owed))
#endif

#define demand_from(t, n) done[t] = 0; demand[t] = n

#define all_read (empty(mail[0]) && empty(mail[1]))
#define lacks(t, u) (in_turn?[t] && held_by(t) < NEEDS && free_chunks < NEEDS - held_by(t) && can_be_asked(u))

proctype writer() {
  byte c, left;
  {
    /* Demands of a predecessor are nobody's wish any more, and what it had for serving is free. */
    atomic {
      demand[0] = 0; demand[1] = 0;
      wanted = 0;
      owner[0] = (owner[0] == SERVING -> FREE : owner[0]);
      owner[1] = (owner[1] == SERVING -> FREE : owner[1])
    }
end:
    do
    :: nempty(mail[0]) -> take_mail(0)
    :: nempty(mail[1]) -> take_mail(1)
    :: atomic { all_read && !wanted && comes_before(0) && can_have(0) -> left = more_for(0) }; grant(0)
    :: atomic { all_read && !wanted && comes_before(1) && can_have(1) -> left = more_for(1) }; grant(1)
    :: atomic { all_read && !wanted && lacks(0, 1) -> demand_from(1, NEEDS - held_by(0) - free_chunks) }
    :: atomic { all_read && !wanted && lacks(1, 0) -> demand_from(0, NEEDS - held_by(1) - free_chunks) }
    :: atomic { wanted && may_serve && all_read && free_chunks == 0 && can_be_asked(0) -> demand_from(0, 1) }
    :: atomic { wanted && may_serve && all_read && free_chunks == 0 && can_be_asked(1) -> demand_from(1, 1) }
#ifdef BUSY
    :: atomic { !wanted && !is_serving && may_serve -> wanted = 1 }
    :: atomic { wanted && !may_serve -> wanted = 0 }
    :: atomic { wanted && may_serve && free_chunks > 0 -> c = (owner[0] == FREE -> 0 : 1); owner[c] = SERVING; holds[c] = 0; c = 0; wanted = 0 }
#ifndef NO_TURN
    :: atomic { is_owed && is_serving -> c = (owner[0] == SERVING -> 0 : 1); owner[c] = FREE; c = 0 }
#endif
#else
    :: atomic { serves > 0 && !wanted -> wanted = 1; serves-- }
    :: atomic { wanted && free_chunks > 0 -> c = (owner[0] == FREE -> 0 : 1); owner[c] = SERVING; holds[c] = 0 };
       atomic { owner[c] = FREE; c = 0; wanted = 0 }
#endif
    :: atomic { demand[0] > 0 && done[0] -> demand[0] = 0 }
    :: atomic { demand[1] > 0 && done[1] -> demand[1] = 0 }
#ifndef PATIENT
    :: atomic { demand[0] > 0 -> demand[0] = 0 }
    :: atomic { demand[1] > 0 -> demand[1] = 0 }
    :: wanted = 0
#endif
#ifdef DEATH
    :: gone[0] && !reclaimed[0] ->
       demand[0] = 0;
       do
       :: nempty(mail[0]) -> mail[0]?c
       :: empty(mail[0]) -> break
       od;
       for (c : 0 .. CHUNKS - 1) {
         owner[c] = (owner[c] == of(0) -> FREE : owner[c])
       }
#ifndef NO_SWEEP
       for (c : 0 .. SLOTS - 1) {
         slot_owner[c] = (slot_owner[c] == of(0) -> FREE : slot_owner[c])
       }
#endif
       if
       :: in_turn??[0] -> in_turn??0
       :: else
       fi;
       asks[0] = 0;
       c = 0;
       assert(held_by(0) == 0);
       assert(slot_owner[0] != of(0) && slot_owner[1] != of(0) && slot_owner[SLOTS - 2] != of(0) && slot_owner[SLOTS - 1] != of(0));
       reclaimed[0] = 1
#endif
    od
  } unless { writer_killed };
  writer_ended = 1
}

#ifdef DEATH
proctype killer() {
  killed[0] = 1;
  launcher_ended[0] && control_ended[0];
  gone[0] = 1
}
#endif

#ifdef SUCCESSION
proctype succession() {
  byte n;
  for (n : 1 .. KILLS) {
    writer_killed = 1;
    writer_ended;
    atomic { writer_killed = 0; writer_ended = 0; run writer() }
  }
}
#endif

init {
  atomic {
    owner[0] = of(0);
    mapped[0] = 0;
    holds[0] = contents(0, 0);
#if NEEDS == 1
    owner[1] = of(1);
    mapped[at(0, 1)] = NOTHING;
    mapped[at(1, 0)] = 1;
    mapped[at(1, 1)] = NOTHING;
    holds[1] = contents(1, 0);
#else
    owner[1] = of(0);
    mapped[1] = 1;
    holds[1] = contents(0, 1);
    closed[1] = 1;
    slot_of[2] = 0; slot_of[3] = 1;
    slot_owner[0] = of(1); slot_owner[1] = of(1);
    slot_holds[0] = contents(1, 0); slot_holds[1] = contents(1, 1);
#endif
    run launcher(0); run launcher(1);
    run control(0); run control(1);
    run writer();
#ifdef DEATH
    run killer();
#endif
#ifdef SUCCESSION
    run succession()
#endif
  }
}

/* The server is answered, and each tenant launches again and again. */
ltl served { always (wanted implies eventually !wanted) }
ltl runs0 { always eventually inside[0] }
ltl runs1 { always eventually inside[1] }
